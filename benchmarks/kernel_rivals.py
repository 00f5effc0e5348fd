"""Other kernels for the same chains, where their packages are installed. They need not be exact."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .kernel_workloads import Workload

Form = Callable[..., Any]

# SGLang has moved its diffusion kernels between releases.
_SGLANG = (
    "sglang.kernels.ops.diffusion",
    "sglang.kernels.ops.diffusion.norm.native_bf16_rmsnorm_triton",
    "sglang.kernels.ops.diffusion.activation.silu_mul_bitexact",
    "sglang.kernels.ops.diffusion.triton.native_bf16_rmsnorm",
)


def rivals(workload: Workload, compiles: bool) -> dict[str, Form]:
    """By name, each taking the workload's arguments; torch.compile's of the eager form only if `compiles`."""
    forms = {"comfy-kitchen": _comfy_kitchen(workload.chain), "SGLang": _sglang(workload)}
    found = {name: form for name, form in forms.items() if form is not None}
    if compiles:
        found["torch.compile"] = torch.compile(workload.eager, dynamic=False)
    return found


def _comfy_kitchen(chain: str) -> Form | None:
    try:
        import comfy_kitchen
    except ImportError:
        return None

    def rope(q: Any, k: Any, q_weight: Any, k_weight: Any, freqs: Any, eps: float) -> Any:
        return comfy_kitchen.rms_rope_split_half(q, k, freqs, q_weight, k_weight, eps)

    def quantise(x: torch.Tensor) -> torch.Tensor:
        one = torch.ones((), dtype=torch.float32, device=x.device)
        quantised: torch.Tensor = comfy_kitchen.quantize_per_tensor_fp8(x.flatten(0, 1), one, torch.float8_e4m3fn)
        return quantised.view(x.shape)

    forms: dict[str, Form] = {"rms-norm-rope q, k": rope, "quantise": quantise}
    return forms.get(chain)


def _sglang(workload: Workload) -> Form | None:
    if workload.dtype_out != torch.bfloat16:
        return None
    if workload.chain == "modulate" and (scale_of := _find("rmsnorm_scale")) is not None:
        return lambda x, weight, scale, eps, *_: scale_of(x, weight, 1.0 + scale, eps)
    if workload.chain == "gate" and (gate_of := _find("rmsnorm_tanh_residual")) is not None:
        return lambda x, branch, weight, gate, eps: gate_of(branch, gate, x, weight, eps)
    if workload.chain == "silu-mul" and (silu_of := _find("fused_silu_mul_bitexact")) is not None:
        return lambda a, b, *_: silu_of(a, b)
    return None


def _find(function: str) -> Form | None:
    for name in _SGLANG:
        try:
            found: Form | None = getattr(importlib.import_module(name), function, None)
        except Exception:  # an installed SGLang may lack what a module of its own imports
            continue
        if found is not None:
            return found
    return None
