"""ComfyUI's fp8 Linears: when one quantises its input with a constant scale of 1, and how to spare it that.

Source: `Linear.forward` of `mixed_precision_ops` in core's `comfy/ops.py`, and comfy-kitchen's `tensor/fp8.py` behind
it: without an input scale the layout's scale is 1, and two fp8 tensors are multiplied by `scaled_mm_v2`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import comfy.ops
import torch
from comfy.quant_ops import QuantizedTensor, get_layout_class
from torch import nn

from ...fusion.emission import Emission
from ...fusion.exchange import is_meddled_with

try:
    from comfy_kitchen.scaled_mm_v2 import scaled_mm_v2
except ImportError:  # another comfy-kitchen: its tensors then dispatch for themselves
    scaled_mm_v2 = None

LAYOUT = "TensorCoreFP8E4M3Layout"
_SCALES = ("input_scale", "pre_quant_scale")


def _takes(linear: nn.Module) -> bool:
    module: Any = linear
    own = module.__dict__  # where core puts them; `getattr` takes 2 us for what is missing, and most of these are
    parameters = own["_parameters"]
    return (
        own.get("layout_type") == LAYOUT
        and not own.get("_full_precision_mm", True)
        and not module.weight_function
        and not module.bias_function
        and not own.get("comfy_force_cast_weights")
        and not any(own.get(name) is not None or parameters.get(name) is not None for name in _SCALES)
        and not is_meddled_with(module)
    )


def _multiply(linear: nn.Module, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What core's Linear comes to for an input that is quantised already, without the tensor subclass that its
    operators are found by: 50 us on the host of an H200 instead of 110."""
    comfy.ops.run_every_op()  # cancelling takes effect between Linears
    dtype = torch.bfloat16
    cast = comfy.ops.CastBiasWeightContext(
        *(linear, None, dtype, rows.device, dtype), offloadable=True, compute_dtype=dtype, want_requant=True
    )
    with cast as (weight, bias):
        if scaled_mm_v2 is not None and isinstance(weight, QuantizedTensor) and weight._layout_cls == LAYOUT:
            one, other = scale, weight._params.scale
            with contextlib.suppress(RuntimeError, TypeError):  # then as comfy-kitchen does where this fails
                product: torch.Tensor = scaled_mm_v2(
                    rows, weight._qdata.t(), scale_a=one, scale_b=other, bias=bias, out_dtype=dtype
                )
                return product
        return torch.nn.functional.linear(_wrap(rows, scale), weight, bias)


def _wrap(rows: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
    params = get_layout_class(LAYOUT).Params(scale=scale, orig_dtype=torch.bfloat16, orig_shape=tuple(rows.shape))
    return QuantizedTensor(rows, LAYOUT, params)


def _quantise(rows: torch.Tensor) -> torch.Tensor:
    quantised: torch.Tensor = QuantizedTensor.from_float(rows, LAYOUT, scale=None)._qdata
    return quantised


EMISSION = Emission(_takes, _multiply, _quantise)
