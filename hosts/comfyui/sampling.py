"""Samples a MODEL with a preset through core's guiders and samplers: progress, previews and cancel are core's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.utils
import latent_preview
import torch
from comfy.model_patcher import ModelPatcher

from ...sampling.presets import PRESETS, Preset
from ...sampling.schedule import sigmas
from .quality import quality_of

Latent = dict[str, Any]
Conditioning = list[Any]


class MissingUnconditional(ValueError):
    """A preset guides with a second model, and none was given."""


def find_preset(name: str) -> Preset:
    """The preset of that name. Raises ValueError if there is none."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is none of {', '.join(PRESETS)}")
    return PRESETS[name]


def fit_latent(model: ModelPatcher, latent: Latent) -> Latent:
    """The latent as the model takes it: core widens an empty one of another family to [B, 128, H / 16, W / 16]."""
    fitted = dict(latent)
    fitted["samples"] = comfy.sample.fix_empty_latent_channels(
        model,
        latent["samples"],
        fitted.pop("downscale_ratio_spacial", None),
        fitted.pop("downscale_ratio_temporal", None),
    )
    return fitted


def pixel_size(model: ModelPatcher, latent: Latent) -> tuple[int, int]:
    """Width and height in pixels of the picture that a fitted latent stands for."""
    height, width = latent["samples"].shape[-2:]
    ratio = int(model.get_model_object("latent_format").spacial_downscale_ratio)
    return int(width) * ratio, int(height) * ratio


def preset_sigmas(model: ModelPatcher, latent: Latent, preset: Preset) -> torch.Tensor:
    """The preset's noise levels at the latent's size, [steps + 1] float32."""
    return sigmas(preset, *pixel_size(model, fit_latent(model, latent)))


def make_guider(
    model: ModelPatcher,
    positive: Conditioning,
    preset: Preset,
    levels: torch.Tensor,
    unconditional: ModelPatcher | None = None,
) -> comfy.samplers.CFGGuider:
    """The preset's guidance over `levels`: one forward a step where it is 1 throughout, else two models.

    Raises:
        MissingUnconditional: the preset guides and `unconditional` is None.
    """
    if not preset.needs_unconditional:
        guider = comfy.samplers.CFGGuider(model)
        guider.inner_set_conds({"positive": positive})
        guider.set_cfg(1.0)
        return guider
    if unconditional is None:
        raise MissingUnconditional(
            f"{preset.name} guides with the unconditional Ideogram 4 model: connect it (a folder's comes with "
            f"load_unconditional), or choose INSTANT_8 or FAST_20 with their own checkpoints"
        )
    from .guidance import StepGuider

    stepped = StepGuider(model, unconditional)
    stepped.set_conds(positive, [[None, {}]])
    stepped.set_guidance(levels, preset.guidance)
    return stepped


def preset_status(preset: Preset, unconditional: ModelPatcher | None = None, model: ModelPatcher | None = None) -> str:
    """What a preset does and which checkpoint it is made for, in a line; with a warning where a model is not used.

    Args:
        preset: the preset.
        unconditional: the model that is connected for the presets that guide.
        model: the one that it guides.
    """
    runs = [(scale, len(list(steps))) for scale, steps in groupby(preset.guidance)]
    guided = " then ".join(f"{count} steps at guidance {scale:g}" for scale, count in runs)
    line = f"{preset.name}: {guided}; made for {preset.checkpoint}, others may give poor pictures"
    if unconditional is not None and not preset.needs_unconditional:
        line += f"; WARNING: the unconditional model is connected and not used, {preset.name} runs one model"
    if unconditional is not None and model is not None and preset.needs_unconditional:
        first, second = quality_of(model), quality_of(unconditional)
        if first != second:
            line += f"; WARNING: both models run at the first one's fusion quality, {first}, not at {second}"
    return line


def euler() -> comfy.samplers.Sampler:
    """The sampler of every preset."""
    return comfy.samplers.sampler_object("euler")


class StepClock:
    """Takes the time behind each step, as `sample`'s `on_step`; the device has then finished the step."""

    def __init__(self) -> None:
        self._stamps: list[float] = []

    def __call__(self, step: int) -> None:
        comfy.model_management.synchronize()
        self._stamps.append(time.perf_counter())

    @property
    def seconds_per_step(self) -> list[float]:
        """The times between two steps, so that of the first is not among them."""
        return [after - before for before, after in pairwise(self._stamps)]


def sample(
    guider: comfy.samplers.CFGGuider,
    levels: torch.Tensor,
    latent: Latent,
    seed: int,
    on_step: Callable[[int], None] | None = None,
) -> Latent:
    """Denoises a latent along `levels` with core's Euler sampler.

    Args:
        guider: whose model, conditioning and guidance to use.
        levels: noise levels, [steps + 1].
        latent: starting latent; `noise_mask` and `batch_index` are heeded as core's sampler nodes do.
        seed: of the noise, drawn as core's RandomNoise draws it.
        on_step: called with the number of each step once the model has run it, before core's own callback.

    Returns:
        The latent with its new `samples` on core's intermediate device.
    """
    fitted = fit_latent(guider.model_patcher, latent)
    start = fitted["samples"]
    noise = comfy.sample.prepare_noise(start, seed, fitted.get("batch_index"))
    preview = latent_preview.prepare_callback(guider.model_patcher, len(levels) - 1)

    def callback(step: int, denoised: torch.Tensor, x: torch.Tensor, total: int) -> None:
        if on_step is not None:
            on_step(step)
        preview(step, denoised, x, total)

    samples = guider.sample(
        noise,
        start,
        euler(),
        levels,
        denoise_mask=fitted.get("noise_mask"),
        callback=callback,
        disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
        seed=seed,
    )
    return {**fitted, "samples": samples.to(comfy.model_management.intermediate_device())}
