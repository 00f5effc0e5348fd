"""Load Ideogram 4 LoRA: a LoRA of any naming on a MODEL, and what of it fitted."""

from __future__ import annotations

from typing import Any

import folder_paths
from comfy_api.latest import io
from typing_extensions import override

from ..hosts.comfyui.lora import apply_lora
from .inputs import CATEGORY

_FOLDER = "loras"


class LoadIdeogram4Lora(io.ComfyNode):
    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Ideogram4Fusion_LoadLora",
            display_name="Load Ideogram 4 LoRA",
            category=CATEGORY,
            description="Puts a LoRA on an Ideogram 4 model, whoever trained it: diffusers (q, k and v apart), "
            "ai-toolkit, kohya or ComfyUI. Says how many layers it changes and which of its tensors match nothing.",
            search_aliases=["ideogram", "lora", "lycoris"],
            inputs=[
                io.Model.Input("model", tooltip="An Ideogram 4 model, before the quality node."),
                io.Combo.Input(
                    "lora_name", options=folder_paths.get_filename_list(_FOLDER), tooltip="A file of models/loras."
                ),
                io.Float.Input(
                    "strength_model",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="What the LoRA is multiplied by; 0 leaves the model as it is.",
                ),
            ],
            outputs=[
                io.Model.Output(),
                io.String.Output("applied", display_name="applied", tooltip="What was applied, in words."),
            ],
        )

    @classmethod
    @override
    def execute(cls, model: Any, lora_name: str, strength_model: float) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise(_FOLDER, lora_name)
        return io.NodeOutput(*apply_lora(model, path, strength_model))
