"""Ideogram 4 Preset: everything core's SamplerCustomAdvanced needs besides noise."""

from __future__ import annotations

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from typing_extensions import override

from ..hosts.comfyui.sampling import Conditioning, Latent, euler, find_preset, make_guider, preset_sigmas, preset_status
from .inputs import (
    CATEGORY,
    latent_input,
    model_input,
    positive_input,
    preset_input,
    preset_status_output,
    unconditional_input,
)
from .status_text import show_on


class Ideogram4Preset(io.ComfyNode):
    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Ideogram4Fusion_Preset",
            display_name="Ideogram 4 Preset",
            category=CATEGORY,
            description="Guider, sampler and sigmas of an Ideogram 4 preset, for Sampler Custom Advanced. The "
            "schedule follows the size of the latent; INSTANT_8 and FAST_20 take one model and no negative prompt.",
            search_aliases=["ideogram", "scheduler", "sigmas", "instant", "fast", "turbo"],
            inputs=[model_input(), positive_input(), latent_input(), preset_input(), unconditional_input()],
            outputs=[io.Guider.Output(), io.Sampler.Output(), io.Sigmas.Output(), preset_status_output()],
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
        unconditional_model: ModelPatcher | None = None,
    ) -> io.NodeOutput:
        chosen = find_preset(preset)
        levels = preset_sigmas(model, latent_image, chosen)
        guider = make_guider(model, positive, chosen, levels, unconditional_model)
        status = preset_status(chosen, unconditional_model, model)
        show_on(cls.hidden.unique_id)(status)
        return io.NodeOutput(guider, euler(), levels, status)
