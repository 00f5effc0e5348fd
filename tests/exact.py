"""One small transformer whose numbers every published layout can hold exactly, and its file in each of them."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from ideogram4_fusion.tests.tiny import StateDict, is_linear_weight, tiny_state_dict

# The values of nvfp4's four bits, which e4m3, bf16 and fp16 have too.
_GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BLOCK = 16


def exact_state_dict(config: dict[str, Any]) -> StateDict:
    """fp32 weights of `config`, each Linear on a grid times a power of two, a value of 6 in every block of 16."""
    weights: StateDict = {}
    for name, tensor in tiny_state_dict(config).items():
        if is_linear_weight(name, tensor):
            unit = grid_unit(tensor)
            nearest = (tensor.abs().div(unit)[..., None] - _GRID).abs().argmin(-1)
            values = _GRID[nearest].copysign(tensor)
            values[:, ::_BLOCK] = values[:, ::_BLOCK].sign().masked_fill(values[:, ::_BLOCK] == 0, 1) * 6
            weights[name] = values * unit
        else:
            weights[name] = tensor.mul(64).round().div(64)
    return weights


def grid_unit(tensor: torch.Tensor) -> float:
    """The power of two that a Linear's grid is multiplied by; the same for the values that it gives."""
    return 2.0 ** round(math.log2(tensor.shape[1] ** -0.5 / 2))


def row_wise(weights: StateDict) -> StateDict:
    """The official form, with a scale of its own for each of three kinds of row."""
    stored: StateDict = {}
    for name, tensor in weights.items():
        if not is_linear_weight(name, tensor):
            stored[name] = tensor.bfloat16()
            continue
        scale = grid_unit(tensor) * 2.0 ** -(torch.arange(tensor.shape[0]) % 3).float()
        stored[name] = (tensor / scale[:, None]).to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = scale
    return stored


def fp8_scaled(weights: StateDict) -> StateDict:
    """Comfy-Org's form."""
    stored: StateDict = {}
    for name, tensor in weights.items():
        if not is_linear_weight(name, tensor):
            stored[name] = tensor.bfloat16()
            continue
        stored[name] = (tensor / grid_unit(tensor)).to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = torch.tensor(grid_unit(tensor))
        stored[f"{name.removesuffix('weight')}comfy_quant"] = mark(format="float8_e4m3fn")
    return stored


def legacy_scaled(weights: StateDict) -> StateDict:
    """The same as files were marked before."""
    return as_legacy(fp8_scaled(weights))


def as_legacy(scaled: StateDict) -> StateDict:
    """Per-tensor fp8 with comfy_quant -> as it was marked before: scale_weight, input scales of 1, and scaled_fp8."""
    stored: StateDict = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in scaled.items():
        if name.endswith(".weight_scale"):
            stored[name.replace(".weight_scale", ".scale_weight")] = tensor
            stored[name.replace(".weight_scale", ".scale_input")] = torch.ones(())
        elif not name.endswith(".comfy_quant"):
            stored[name] = tensor
    return stored


def mark(**says: Any) -> torch.Tensor:
    """A `comfy_quant` tensor."""
    return torch.tensor(list(json.dumps(says).encode()), dtype=torch.uint8)
