"""ComfyUI's fp8 Linears: when one quantises its input with a constant scale of 1, and how to spare it that.

Source: `Linear.forward` of `mixed_precision_ops` in core's `comfy/ops.py`: without an input scale the layout's scale is
1, and an input that is a QuantizedTensor already is multiplied as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from comfy.quant_ops import QuantizedTensor, get_layout_class
from torch import nn

from ...fusion.emission import Emission
from ...fusion.exchange import is_patched

LAYOUT = "TensorCoreFP8E4M3Layout"


def _takes(linear: nn.Module) -> bool:
    module: Any = linear
    return (
        getattr(module, "layout_type", None) == LAYOUT
        and not module._full_precision_mm
        and not getattr(module, "comfy_force_cast_weights", False)
        and not module.weight_function
        and not module.bias_function
        and getattr(module, "input_scale", None) is None
        and getattr(module, "pre_quant_scale", None) is None
        and not (module._forward_hooks or module._forward_pre_hooks or is_patched(module))
    )


def _wrap(rows: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
    params = get_layout_class(LAYOUT).Params(scale=scale, orig_dtype=torch.bfloat16, orig_shape=tuple(rows.shape))
    return QuantizedTensor(rows, LAYOUT, params)


def _quantise(rows: torch.Tensor) -> torch.Tensor:
    quantised: torch.Tensor = QuantizedTensor.from_float(rows, LAYOUT, scale=None)._qdata
    return quantised


EMISSION = Emission(_takes, _wrap, _quantise)
