"""Whether kernels can run on a device, found by running the smallest one. Imports Triton only to try it."""

from __future__ import annotations

import importlib.util

import torch

from .memory import is_out_of_memory
from .rows import interpreted

# bf16 arithmetic and conversions in hardware.
MIN_CAPABILITY = (8, 0)


def is_nvidia(device: torch.device) -> bool:
    """Whether it is a GPU of NVIDIA's: PyTorch calls AMD's `cuda` too."""
    return device.type == "cuda" and torch.version.hip is None


def unavailable(device: torch.device) -> str | None:
    """Why no kernel can run on `device`, in one clause for a status line, or None. Compiles one small kernel."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (on Windows: pip install triton-windows)"
    if device.type != "cuda":
        if not interpreted():
            return f"the kernels run on a GPU, this model runs on {device.type}"
    elif torch.version.hip is not None:
        return "the kernels are made for NVIDIA GPUs"
    elif torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        return f"{name} has compute capability {major}.{minor}, the kernels need 8.0 for bfloat16"
    try:
        from .silu_mul import silu_mul

        a = torch.linspace(-4, 4, 16, device=device).bfloat16()
        if not torch.equal(silu_mul(a, torch.ones_like(a)).isfinite(), torch.ones_like(a, dtype=torch.bool)):
            return "a first Triton kernel returned non-finite numbers"
    except Exception as error:  # whatever Triton, its compiler or its driver raise: the model then runs stock
        if is_out_of_memory(error):
            return None  # says nothing about the kernels
        return f"Triton cannot run here ({_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]
