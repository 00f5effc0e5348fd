"""Load Ideogram 4: a diffusion model file in any of the supported layouts -> MODEL."""

from __future__ import annotations

import folder_paths
from comfy_api.latest import io
from typing_extensions import override

from ..hosts.comfyui.load import describe_file, load_diffusion_model, settle_row_wise
from ..hosts.comfyui.row_wise import AUTO, CHOICES
from .inputs import CATEGORY

_FOLDER = "diffusion_models"


class LoadIdeogram4(io.ComfyNode):
    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Ideogram4Fusion_LoadModel",
            display_name="Load Ideogram 4",
            category=CATEGORY,
            description="Loads an Ideogram 4 diffusion model and says which layout it found: the official row-wise "
            "fp8, Comfy-Org's fp8_scaled, nvfp4_mixed and int8_convrot, or bf16/fp16, with fused or split attention "
            "weights. A file that is incomplete or of another kind is refused with the reason.",
            search_aliases=["ideogram", "unet loader", "diffusion model loader", "fal instant", "fal fast"],
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=folder_paths.get_filename_list(_FOLDER),
                    tooltip="A file of models/diffusion_models. A config.json beside it is heeded.",
                ),
                io.Combo.Input(
                    "row_wise_weights",
                    options=list(CHOICES),
                    default=AUTO,
                    optional=True,
                    advanced=True,
                    tooltip="Of the official row-wise fp8 file alone: bf16 takes 19 GB and is fastest at off and "
                    "lossless; fp8 keeps the file's 9 GB, is dequantised in each step, and is fastest at high, which "
                    "multiplies it as it is; auto is bf16 where that fits. At off and lossless the picture is the "
                    "same. Choose bf16 to merge models, or for LoRAs that conditioning brings: neither works on fp8.",
                ),
            ],
            outputs=[
                io.Model.Output(),
                io.String.Output("layout", display_name="layout", tooltip="What the file holds, in words."),
            ],
        )

    @classmethod
    @override
    def execute(cls, unet_name: str, row_wise_weights: str = AUTO) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise(_FOLDER, unet_name)
        settled = settle_row_wise(path, row_wise_weights)
        return io.NodeOutput(load_diffusion_model(path, settled), describe_file(path, settled))
