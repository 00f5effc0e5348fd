"""A short render of a test's MODEL."""

from __future__ import annotations

from collections.abc import Callable

import torch
from comfy.model_patcher import ModelPatcher
from ideogram4_fusion.hosts.comfyui.sampling import make_guider, preset_sigmas, sample
from ideogram4_fusion.sampling.presets import PRESETS
from ideogram4_fusion.tests.comfyui.models import conditioning, empty_latent

PRESET = PRESETS["INSTANT_8"]


def render(model: ModelPatcher, on_step: Callable[[int], None] | None = None) -> torch.Tensor:
    levels = preset_sigmas(model, empty_latent(), PRESET)[[0, 4, 8]]
    guider = make_guider(model, conditioning(), PRESET, levels)
    return sample(guider, levels, empty_latent(), seed=3, on_step=on_step)["samples"]


def untouched(model: ModelPatcher) -> bool:
    return not any("forward" in module.__dict__ for module in model.model.diffusion_model.modules())
