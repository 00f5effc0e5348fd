"""What fusion must ask the host that owns the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# forward(attention, rope, *args, **kwargs): attention written out with `rope(x, cos, sin)` left open.
AttentionForward = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Host:
    """A host's own ways.

    Attributes:
        name: as it appears in a status line.
        norm_weight: opens an RMSNorm's weight for one use beside `x`, on its device and in its dtype. Weights are
            read in no other way, so that LoRA, offloading and paging keep working.
        attention_forward: the host's attention with its rope left open, where that is the rotate-half chain of eager
            operations; None where the host's rope is its own.
        fusible_attention: whether `attention_forward` stands for this attention module.
    """

    name: str
    norm_weight: Callable[[nn.RMSNorm, torch.Tensor], AbstractContextManager[torch.Tensor]]
    attention_forward: AttentionForward | None = None
    fusible_attention: Callable[[Any], bool] = lambda attention: False
