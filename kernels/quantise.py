"""bf16 -> fp8 with scale 1: what ComfyUI's fp8 Linear does to its input, which the kernels do as they store."""

from __future__ import annotations

import torch

FP8_MAX = 448.0  # torch.finfo(torch.float8_e4m3fn).max


def quantise(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` [...] bf16 as `dtype`: itself as bfloat16, clamped to +-448 and converted as float8_e4m3fn."""
    return x if dtype == x.dtype else x.clamp(-FP8_MAX, FP8_MAX).to(dtype)
