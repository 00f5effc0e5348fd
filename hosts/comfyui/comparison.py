"""Renders two fusion qualities from one seed, one after the other, and says how they compare."""

from __future__ import annotations

import time
from dataclasses import dataclass

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.sd import VAE
from comfyui_version import __version__ as comfyui_version

from ...comparison.environment import describe_environment
from ...comparison.metrics import compare, compare_latents
from ...comparison.pictures import difference, side_by_side
from ...comparison.report import Render, Report
from ...fusion.fusion import OFF
from ...sampling.presets import Preset
from ...sampling.schedule import size_note
from . import quality as fusion_quality
from .sampling import Conditioning, Latent, StepClock, fit_latent, make_guider, pixel_size, preset_sigmas, sample

# One step is enough to load the model, compile the kernels and prove the chains.
WARM_UP_STEPS = 1


@dataclass(frozen=True)
class Comparison:
    """Images are [B, H, W, 3] float32 in 0..1; `gain` is what the difference was multiplied by."""

    image_a: torch.Tensor
    image_b: torch.Tensor
    side_by_side: torch.Tensor
    difference: torch.Tensor
    gain: float
    report: Report


def compare_qualities(
    model: ModelPatcher,
    positive: Conditioning,
    latent: Latent,
    vae: VAE,
    preset: Preset,
    seed: int,
    qualities: tuple[str, str] = ("lossless", "high"),
    unconditional: ModelPatcher | None = None,
) -> Comparison:
    """Renders `qualities` with the same noise, noise levels and conditioning, strictly one after the other.

    Whatever quality `model` carries is replaced for each side, with the pieces of `high` that were chosen on it; core
    runs `unconditional` with the options of `model`, fusion included. Each side is warmed up first, and timed after
    that: seconds per step are the times between two steps, so that of the first is not among them.
    """
    latent = fit_latent(model, latent)
    levels = preset_sigmas(model, latent, preset)
    renders, samples, reasons = [], [], []
    for quality in qualities:
        render, out, reason = _render(model, positive, latent, preset, levels, seed, quality, unconditional)
        renders.append(render)
        samples.append(out)
        reasons.append(reason)
    image_a, image_b = (_decode(vae, s) for s in samples)
    width, height = pixel_size(model, latent)
    amplified, gain = difference(image_a, image_b)
    device = torch.device(model.load_device)
    report = Report(
        a=renders[0],
        b=renders[1],
        metrics=compare(image_a, image_b),
        preset=preset.name,
        width=width,
        height=height,
        seed=seed,
        sigmas=levels.tolist(),
        environment={**describe_environment(device), "comfyui": comfyui_version},
        latents=compare_latents(*samples),
        size_note=size_note(width, height),
        nothing_fused=next((reason for reason in reasons if reason is not None), None),
    )
    labels = [f"{side}: {q}" for side, q in zip("AB", qualities, strict=True)]
    return Comparison(image_a, image_b, side_by_side(image_a, image_b, *labels), amplified, gain, report)


def _render(
    model: ModelPatcher,
    positive: Conditioning,
    latent: Latent,
    preset: Preset,
    levels: torch.Tensor,
    seed: int,
    quality: str,
    unconditional: ModelPatcher | None,
) -> tuple[Render, torch.Tensor, str | None]:
    """One side: its render, its latent samples, and why nothing was fused where something should have been."""
    pieces = fusion_quality.pieces_of(model)
    fused, _ = fusion_quality.set_quality(model, quality, pieces=pieces)
    guider = make_guider(fused, positive, preset, levels, unconditional)
    sample(guider, levels[: WARM_UP_STEPS + 1], latent, seed)

    device = torch.device(model.load_device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock = StepClock()
    start = time.perf_counter()
    out = sample(guider, levels, latent, seed, on_step=clock)["samples"]
    comfy.model_management.synchronize()
    total = time.perf_counter() - start

    status = fusion_quality.status(fused)
    if unconditional is not None and preset.needs_unconditional:
        status += f" | unconditional: {fusion_quality.status(fused, unconditional)}"
    render = Render(
        quality=quality,
        status=status,
        seconds_per_step=clock.seconds_per_step,
        total_seconds=total,
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )
    reason = None if quality == OFF else fusion_quality.unfused_reason(fused)
    return render, out, reason


def _decode(vae: VAE, samples: torch.Tensor) -> torch.Tensor:
    """[B, H, W, 3] float32 on the CPU, as core's VAE Decode gives it."""
    images: torch.Tensor = vae.decode(samples)
    if images.ndim == 5:  # a video VAE's frames
        images = images.reshape(-1, *images.shape[-3:])
    return images.float().cpu()
