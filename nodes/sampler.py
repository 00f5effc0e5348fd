"""Ideogram 4 Sampler: preset and sampling in one node."""

from __future__ import annotations

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from typing_extensions import override

from ..hosts.comfyui.sampling import (
    Conditioning,
    Latent,
    find_preset,
    make_guider,
    preset_sigmas,
    preset_status,
    sample,
)
from .inputs import (
    CATEGORY,
    latent_input,
    model_input,
    positive_input,
    preset_input,
    preset_status_output,
    seed_input,
    unconditional_input,
)
from .status_text import show_on


class Ideogram4Sampler(io.ComfyNode):
    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Ideogram4Fusion_Sampler",
            display_name="Ideogram 4 Sampler",
            category=CATEGORY,
            description="Samples an Ideogram 4 model with a preset. The same as Ideogram 4 Preset with Random Noise "
            "and Sampler Custom Advanced.",
            search_aliases=["ideogram", "ksampler", "instant", "fast", "turbo"],
            inputs=[
                model_input(),
                positive_input(),
                latent_input(),
                preset_input(),
                seed_input(),
                unconditional_input(),
            ],
            outputs=[io.Latent.Output(), preset_status_output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @override
    def execute(
        cls,
        model: ModelPatcher,
        positive: Conditioning,
        latent_image: Latent,
        preset: str,
        seed: int,
        unconditional_model: ModelPatcher | None = None,
    ) -> io.NodeOutput:
        chosen = find_preset(preset)
        levels = preset_sigmas(model, latent_image, chosen)
        guider = make_guider(model, positive, chosen, levels, unconditional_model)
        status = preset_status(chosen, unconditional_model, model)
        show_on(cls.hidden.unique_id)(status)
        return io.NodeOutput(sample(guider, levels, latent_image, seed), status)
