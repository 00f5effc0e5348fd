"""What a loader of another pack gives core: Linears whose weights only they can unpack, as ComfyUI-GGUF's are."""

from __future__ import annotations

from typing import Any

import comfy.ops
import torch
from ideogram4_fusion.tests.exact import grid_unit
from ideogram4_fusion.tests.tiny import StateDict, is_linear_weight

_HALF = 2  # a step of the grid is half its unit


class PackedTensor(torch.nn.Parameter):
    """int8 steps of a grid; nobody but the Linears below may compute with them."""


class PackedOps(comfy.ops.manual_cast):  # type: ignore[misc]
    class Linear(torch.nn.Module):
        def __init__(self, in_features: int, out_features: int, bias: bool = True, **_: Any) -> None:
            super().__init__()
            self.in_features, self.out_features = in_features, out_features
            self.weight: torch.nn.Parameter | None = None
            self.bias: torch.nn.Parameter | None = None
            self.has_bias = bias

        def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *_: Any) -> None:
            self.weight = PackedTensor(state_dict[f"{prefix}weight"], requires_grad=False)
            if self.has_bias:
                self.bias = torch.nn.Parameter(state_dict[f"{prefix}bias"], requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.weight is not None
            weight = self.weight.to(x.device, x.dtype) * (grid_unit(self.weight) / _HALF)
            bias = None if self.bias is None else self.bias.to(x.device, x.dtype)
            return torch.nn.functional.linear(x, weight, bias)


def packed(weights: StateDict) -> StateDict:
    """The state dict of such a loader."""
    state_dict = {name: tensor.bfloat16() for name, tensor in weights.items()}
    for name, tensor in weights.items():
        if is_linear_weight(name, tensor):
            state_dict[name] = (tensor / grid_unit(tensor) * _HALF).to(torch.int8)
    return state_dict
