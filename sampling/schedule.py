"""The noise levels a preset visits at a picture size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .presets import Preset

SIZE_MULTIPLE = 16  # pixels per token: the VAE's factor 8 times the transformer's patch of 2
MIN_SIDE, MAX_SIDE, MAX_ASPECT = 256, 2048, 6

_BASE_PIXELS = 512 * 512
_LOGSNR_MIN, _LOGSNR_MAX = -15.0, 18.0


def sigmas(preset: Preset, width: int, height: int) -> Tensor:
    """Noise levels of `preset` for a picture of `width` x `height` pixels (not latent cells).

    Returns [steps + 1] float32 on the CPU, strictly descending from just below 1 (noise) to exactly 0 (data).

    Logit-normal quantiles: sigma(u) = sigmoid(mu + ln(width * height / 512^2) / 2 + std * ndtri(u)), u from 1 to 0 in
    `steps` equal parts, held within log SNR -15..18. Computed in float64, in the order of operations of
    diffusers' `_logit_normal_sigmas` (pipelines/ideogram4/pipeline_ideogram4.py), so that the values are the same
    to the bit; the last is 0, as there and in ComfyUI's Ideogram4Scheduler.

    Raises ValueError when a side is not a positive multiple of 16.
    """
    if any(side <= 0 or side % SIZE_MULTIPLE for side in (width, height)):
        raise ValueError(f"width and height must be positive multiples of {SIZE_MULTIPLE}, got {width} x {height}")
    mean = preset.mu + 0.5 * math.log(width * height / _BASE_PIXELS)
    quantiles = torch.special.ndtri(torch.linspace(0.0, 1.0, preset.steps + 1, dtype=torch.float64))
    time = 1.0 - torch.special.expit(mean + preset.std * quantiles)
    time = time.clamp(1.0 / (1.0 + math.exp(0.5 * _LOGSNR_MAX)), 1.0 / (1.0 + math.exp(0.5 * _LOGSNR_MIN)))
    levels = (1.0 - time).flip(0)
    levels[-1] = 0.0
    return levels.to(torch.float32)


def size_note(width: int, height: int) -> str | None:
    """One sentence when a size in pixels is outside what Ideogram 4 was made for, else None.

    Limits: ideogram-oss/ComfyUI-Ideogram4, nodes.py. Other sizes render too, so this is never an error.
    """
    longer, shorter = max(width, height), min(width, height)
    if shorter >= MIN_SIDE and longer <= MAX_SIDE and longer <= MAX_ASPECT * shorter:
        return None
    return (
        f"{width} x {height} is outside what the model was made for: "
        f"{MIN_SIDE} to {MAX_SIDE} pixels a side, aspect ratio up to {MAX_ASPECT}:1."
    )
