"""The official row-wise fp8 weights kept as they are, for machines that bf16 does not fit.

core knows fp8 with one scale a tensor. These have one a row, so they get a layout of their own, of the kind that core's
quantised Linear takes: it moves, pages and patches the fp8 values and their scales, and dequantises them for the length
of one call. The numbers are those of weights dequantised once.
"""

from __future__ import annotations

from typing import Any

import comfy.float
import comfy.model_management
import psutil
import torch
from comfy.quant_ops import QuantizedLayout, QuantizedTensor, TensorCoreFP8Layout, register_layout_class
from torch import nn

from ...checkpoint.convert import E4M3_MAX, StateDict
from ...checkpoint.quantisation import fp8_mark

LAYOUT = "Ideogram4RowWiseFP8Layout"

# So that a saved file does not pass for one of core's formats, as which core would misread its scales; it refuses this.
FORMAT = "ideogram4_fp8_row_wise"

# What a step needs beside the weights, as a share of them: 18.6 GB in bf16, and 2 GB at 2048 x 2048.
_ROOM = 1.15

AUTO, BF16, FP8 = "auto", "bf16", "fp8"
CHOICES = (AUTO, BF16, FP8)


class RowWiseFP8Layout(QuantizedLayout):  # type: ignore[misc]  # core is untyped
    """w = w8.to(bf16) * scale.to(bf16)[:, None], scale [out] float32: the reference implementation's weights.

    No operation is registered for it, so that core's get a dequantised weight; `high` multiplies it as it is.
    """

    Params = TensorCoreFP8Layout.Params

    @classmethod
    def quantize(
        cls, tensor: torch.Tensor, scale: object = None, stochastic_rounding: int = 0, inplace_ops: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Scales every row to its largest value; core asks for it once it has patched a dequantised weight.

        Args:
            tensor: [out, in].
            scale: core's wish to have it found anew, as it is in any case.
            stochastic_rounding: a seed, or 0 to round to nearest, which would lose most of a weak LoRA, since the
                values before it lie all but on the grid. core does this to its own fp8 weights too; it moves the rows
                that a LoRA leaves alone by about a hundredth as well.
            inplace_ops: whether `tensor` may be overwritten; it is not.
        """
        found = tensor.abs().amax(dim=1).float().div_(E4M3_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
        found = found.bfloat16().float()  # as it will meet the values again
        scaled = (tensor.float() / found[:, None]).clamp_(-E4M3_MAX, E4M3_MAX)
        if stochastic_rounding > 0:
            qdata = comfy.float.stochastic_rounding(scaled, torch.float8_e4m3fn, seed=stochastic_rounding)
        else:
            qdata = scaled.to(torch.float8_e4m3fn)
        return qdata, cls.Params(scale=found, orig_dtype=tensor.dtype, orig_shape=tuple(tensor.shape))

    @classmethod
    def dequantize(cls, qdata: torch.Tensor, params: Any) -> torch.Tensor:
        weight = qdata.to(torch.bfloat16).mul_(params.scale.to(torch.bfloat16)[:, None])
        return weight.to(params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        return qtensor._qdata, qtensor._params.scale

    @classmethod
    def state_dict_tensors(cls, qdata: torch.Tensor, params: Any) -> dict[str, torch.Tensor]:
        return {"": qdata, "_scale": params.scale}


register_layout_class(LAYOUT, RowWiseFP8Layout)


def keeps_fp8(choice: str, parameters: int) -> bool:
    """Whether weights of that many parameters stay in fp8.

    Args:
        choice: `fp8`, `bf16`, or `auto`: bf16 where it fits the GPU with room to work, and the RAM while it is made.
        parameters: of the model.

    Raises:
        ValueError: no such choice.
    """
    if choice not in CHOICES:
        raise ValueError(f"row-wise weights {choice!r} are none of {', '.join(CHOICES)}")
    if choice != AUTO:
        return choice == FP8
    device = comfy.model_management.get_torch_device()
    needed = 2 * parameters
    on_device = comfy.model_management.get_total_memory(device) >= _ROOM * needed
    return not (on_device and psutil.virtual_memory().available >= needed)


def marked(state_dict: StateDict) -> StateDict:
    """Row-wise fp8 weights with the mark by which core gives them quantised Linears, and the other tensors in bf16."""
    mark = fp8_mark(full_precision_matrix_mult=True)  # core's fp8 Linears that multiply in the compute dtype
    marks = {
        f"{name.removesuffix('_scale').removesuffix('.weight')}.comfy_quant": mark.clone()
        for name in state_dict
        if name.endswith(".weight_scale")
    }
    plain = {
        name: tensor.to(torch.bfloat16)
        for name, tensor in state_dict.items()
        if tensor.is_floating_point() and tensor.dtype != torch.float8_e4m3fn and not name.endswith(".weight_scale")
    }
    return {**state_dict, **plain, **marks}


def adopt(transformer: nn.Module) -> None:
    """Gives the Linears that core has loaded from `marked` weights their layout."""
    for module in transformer.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, QuantizedTensor) and weight._params.scale.ndim == 1:
            # Rounded as they meet the values, so that a product with them as they are is one with the same weights.
            scale = weight._params.scale.bfloat16().float()
            params = RowWiseFP8Layout.Params(
                scale=scale, orig_dtype=weight._params.orig_dtype, orig_shape=weight._params.orig_shape
            )
            kept = QuantizedTensor(weight._qdata, LAYOUT, params)
            module.weight = nn.Parameter(kept, requires_grad=False)
            module.layout_type, module.quant_format = LAYOUT, FORMAT  # type: ignore[assignment]
