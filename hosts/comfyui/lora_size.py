"""The size of the weight that a LoRA's patch is for, as its tensors show it.

core finds out when it patches, too late for words: it logs the layer and leaves it out, or, where only the number of
values fits, takes it. Sources of the shapes: `calculate_weight` of core's adapters, which follow LyCORIS.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from comfy.weight_adapter.loha import LoHaAdapter
from comfy.weight_adapter.lokr import LoKrAdapter
from comfy.weight_adapter.lora import LoRAAdapter

NONE_POSSIBLE: list[int] = []  # the size of factors that do not fit each other


def patch_size(patch: Any) -> list[int] | None:
    """[out, in], with `in` over all inner dimensions; `NONE_POSSIBLE` where no weight could have it.

    Args:
        patch: of core's `load_lora`: an adapter, or a tuple of a kind and tensors.

    Returns:
        None where the tensors do not show it: OFT, BOFT, GLoRA, factors with a core tensor.
    """
    if isinstance(patch, LoRAAdapter):
        up, down, _, middle = patch.weights[:4]
        return None if middle is not None else _product(up, down)
    if isinstance(patch, LoHaAdapter):
        one_a, one_b, _, other_a, other_b, core = patch.weights[:6]
        if core is not None:
            return None
        one, other = _product(one_a, one_b), _product(other_a, other_b)
        return one if one == other else NONE_POSSIBLE
    if isinstance(patch, LoKrAdapter):
        one, other, _, one_a, one_b, other_a, other_b, core = patch.weights[:8]
        if core is not None:
            return None
        left = _whole(one, one_a, one_b)
        right = _whole(other, other_a, other_b)
        if not left or not right:
            return NONE_POSSIBLE
        return [left[0] * right[0], left[1] * right[1]]
    if isinstance(patch, tuple) and patch[0] in ("diff", "set"):
        return list(patch[1][0].shape)
    return None


def _product(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    if a.ndim < 2 or b.ndim < 2 or a.shape[1] != b.shape[0]:
        return NONE_POSSIBLE
    return [a.shape[0], math.prod(b.shape[1:])]


def _whole(factor: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None) -> list[int]:
    """The size of a factor of a Kronecker product, stored as it is or as a product of two."""
    if factor is not None:
        return [factor.shape[0], math.prod(factor.shape[1:])] if factor.ndim >= 2 else NONE_POSSIBLE
    return NONE_POSSIBLE if a is None or b is None else _product(a, b)
