"""Ideogram 4 Fusion Quality: MODEL -> the same model with fused kernels, and what is mounted."""

from __future__ import annotations

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from typing_extensions import override

from ..hosts.comfyui.quality import set_quality
from .inputs import CATEGORY, model_input, quality_input
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
            "loaders and in front of the sampler; of several, the last one counts. Where kernels cannot run, the "
            "model stays stock and the status says why. Works on both models of a two-model graph; use one node each.",
            search_aliases=["ideogram", "speed", "triton", "kernel", "lossless", "optimize"],
            inputs=[model_input(), quality_input("quality", "lossless", "What may change.")],
            outputs=[
                io.Model.Output(),
                io.String.Output("status", display_name="status", tooltip="What is mounted, or why nothing is."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @override
    def execute(cls, model: ModelPatcher, quality: str) -> io.NodeOutput:
        show = show_on(cls.hidden.unique_id)
        fused, status = set_quality(model, quality, show)
        show(status)
        return io.NodeOutput(fused, status)
