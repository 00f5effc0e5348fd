"""Other kernels for the same chains, where their packages are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .kernel_workloads import Workload


def rivals(workload: Workload, compiles: bool) -> dict[str, Callable[..., Any]]:
    """By name, each taking the workload's arguments; torch.compile's of the eager form only if `compiles`."""
    found = dict(_comfy_kitchen(workload.chain))
    if compiles:
        found["torch.compile"] = torch.compile(workload.eager, dynamic=False)
    return found


def _comfy_kitchen(chain: str) -> dict[str, Callable[..., Any]]:
    try:
        import comfy_kitchen
    except ImportError:
        return {}

    def rope(q: Any, k: Any, q_weight: Any, k_weight: Any, freqs: Any, eps: float) -> Any:
        return comfy_kitchen.rms_rope_split_half(q, k, freqs, q_weight, k_weight, eps)

    def quantise(x: torch.Tensor) -> torch.Tensor:
        one = torch.ones((), dtype=torch.float32, device=x.device)
        quantised: torch.Tensor = comfy_kitchen.quantize_per_tensor_fp8(x.flatten(0, 1), one, torch.float8_e4m3fn)
        return quantised.view(x.shape)

    forms: dict[str, Callable[..., Any]] = {"rms-norm-rope q, k": rope, "quantise": quantise}
    return {"comfy-kitchen": forms[chain]} if chain in forms else {}
