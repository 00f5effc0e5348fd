"""Ideogram 4 Fusion Quality: MODEL -> the same model with fused kernels, and what is mounted."""

from __future__ import annotations

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from typing_extensions import override

from ..fusion.pieces import ALL, Pieces
from ..hosts.comfyui.quality import set_quality
from .inputs import CATEGORY, model_input, piece_inputs, quality_input
from .status_text import show_on


class FusionQuality(io.ComfyNode):
    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Ideogram4Fusion_FusionQuality",
            display_name="Ideogram 4 Fusion Quality",
            category=CATEGORY,
            description="Mounts fused Triton kernels on the blocks of an Ideogram 4 model. Place it behind LoRA "
            "loaders and in front of the sampler; of several, the last one counts. Where kernels cannot run, "
            "the blocks stay stock and the status says why. In a graph with two models the quality of the first holds "
            "for both.",
            search_aliases=["ideogram", "speed", "triton", "kernel", "lossless", "optimize"],
            inputs=[model_input(), quality_input("quality", "lossless", "What may change."), *piece_inputs()],
            outputs=[
                io.Model.Output(),
                io.String.Output("status", display_name="status", tooltip="What is mounted, or why nothing is."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @override
    def execute(
        cls,
        model: ModelPatcher,
        quality: str,
        attention: str = ALL.attention,
        fast_accumulation: bool = ALL.fast_accumulation,
        row_wise_fp8: bool = ALL.row_wise_fp8,
        unproven_chains: bool = ALL.unproven_chains,
    ) -> io.NodeOutput:
        show = show_on(cls.hidden.unique_id)
        pieces = Pieces(attention, fast_accumulation, row_wise_fp8, unproven_chains)
        fused, status = set_quality(model, quality, show, pieces)
        show(status)
        return io.NodeOutput(fused, status)
