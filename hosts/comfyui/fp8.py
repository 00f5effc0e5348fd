"""ComfyUI's fp8 Linears: when one quantises its input with a constant scale of 1, and how to spare it that; and ours
with a scale for each row, which `high` multiplies as they are.

Source: `Linear.forward` of `mixed_precision_ops` in core's `comfy/ops.py`, and comfy-kitchen's `tensor/fp8.py` behind
it: without an input scale the layout's scale is 1, and two fp8 tensors are multiplied by `scaled_mm_v2`.
"""

from __future__ import annotations

from typing import Any

import comfy.ops
import torch
from comfy.quant_ops import QuantizedTensor, get_layout_class
from torch import nn

from ...fusion.emission import Emission
from ...fusion.exchange import is_meddled_with
from ...kernels.availability import is_nvidia
from ...kernels.memory import is_out_of_memory
from .row_wise import LAYOUT as ROW_WISE

try:
    from comfy_kitchen.scaled_mm_v2 import scaled_mm_v2
except ImportError:  # another comfy-kitchen: its tensors then dispatch for themselves
    scaled_mm_v2 = None

LAYOUT = "TensorCoreFP8E4M3Layout"
_SCALES = ("input_scale", "pre_quant_scale")


def _takes(linear: nn.Module) -> bool:
    own = linear.__dict__  # where core puts them; `getattr` takes 2 us for what is missing, and most of these are
    return own.get("layout_type") == LAYOUT and not own.get("_full_precision_mm", True) and _multiplies_as_is(linear)


def _takes_rows(linear: nn.Module) -> bool:
    return linear.__dict__.get("layout_type") == ROW_WISE and _multiplies_as_is(linear)


def _multiplies_as_is(linear: nn.Module) -> bool:
    """Whether nothing on a quantised Linear changes its weight, its input or its output."""
    module: Any = linear
    own = module.__dict__
    parameters = own["_parameters"]
    return (
        not module.weight_function
        and not module.bias_function
        and not own.get("comfy_force_cast_weights")
        and not any(own.get(name) is not None or parameters.get(name) is not None for name in _SCALES)
        and not is_meddled_with(module)
    )


def _multiply(linear: nn.Module, rows: torch.Tensor, scale: torch.Tensor, fast: bool) -> torch.Tensor:
    """What core's Linear comes to for an input that is quantised already, without the tensor subclass that its
    operators are found by: 50 us on the host of an H200 instead of 110.

    `fast` is cuBLAS's fast accumulation, which core does without.
    """
    comfy.ops.run_every_op()  # cancelling takes effect between Linears
    dtype = torch.bfloat16
    cast = comfy.ops.CastBiasWeightContext(
        *(linear, None, dtype, rows.device, dtype), offloadable=True, compute_dtype=dtype, want_requant=True
    )
    with cast as (weight, bias):
        if scale.ndim:
            return _multiply_rows(rows, scale, weight, bias, fast)
        if scaled_mm_v2 is not None and isinstance(weight, QuantizedTensor) and weight._layout_cls == LAYOUT:
            one, other = scale, weight._params.scale
            try:
                if fast:
                    return torch._scaled_mm(
                        rows, weight._qdata.t(), one, other, bias=bias, out_dtype=dtype, use_fast_accum=True
                    )
                product: torch.Tensor = scaled_mm_v2(
                    rows, weight._qdata.t(), scale_a=one, scale_b=other, bias=bias, out_dtype=dtype
                )
                return product
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError):
                pass  # then as comfy-kitchen does where this fails
        return torch.nn.functional.linear(_wrap(rows, scale), weight, bias)


def _multiply_rows(
    rows: torch.Tensor, scale: torch.Tensor, weight: Any, bias: torch.Tensor | None, fast: bool
) -> torch.Tensor:
    if isinstance(weight, QuantizedTensor) and weight._layout_cls == ROW_WISE:
        try:
            return torch._scaled_mm(
                rows,
                weight._qdata.t(),
                scale,
                weight._params.scale.view(1, -1),
                bias=bias,
                out_dtype=torch.bfloat16,
                use_fast_accum=fast,
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # of a size that it does not take
            weight = weight.dequantize()
    # Or dequantised on its way here: by a patch that came with the cast, or on another device.
    return torch.nn.functional.linear(rows.to(weight.dtype) * scale.to(weight.dtype), weight, bias)


def _no_rows(device: torch.device) -> str | None:
    return _no_product(device, (16, 1), fast=False) or _no_product(device, (16, 1), fast=True)


def _no_fast(device: torch.device) -> str | None:
    return _no_product(device, (), fast=True)


def _no_product(device: torch.device, scales: tuple[int, ...], fast: bool) -> str | None:
    """Tries one with so many scales; which GPUs have it depends on PyTorch's version."""
    if not is_nvidia(device):
        return "it needs an NVIDIA GPU"
    try:
        scale = torch.ones(scales, device=device)
        one = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
        torch._scaled_mm(one, one.t(), scale, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast)
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None  # says nothing about the product
        return f"PyTorch has no such product here: {' '.join(str(error).split())[:80]}"
    return None


def _wrap(rows: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
    params = get_layout_class(LAYOUT).Params(scale=scale, orig_dtype=torch.bfloat16, orig_shape=tuple(rows.shape))
    return QuantizedTensor(rows, LAYOUT, params)


def _quantise(rows: torch.Tensor) -> torch.Tensor:
    quantised: torch.Tensor = QuantizedTensor.from_float(rows, LAYOUT, scale=None)._qdata
    return quantised


EMISSION = Emission(_takes, _multiply, _quantise, _takes_rows, _no_rows, _no_fast)
