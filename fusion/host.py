"""What fusion must ask the host that owns the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .chains import Chain
from .emission import Emission, Emitted

Spare = Callable[[nn.Module, torch.Tensor], torch.Tensor | Emitted]


@dataclass(frozen=True)
class AttentionForm:
    """A host's attention written out, so that its rope can be exchanged.

    Attributes:
        forward: forward(attention, rope, spare, x, **arguments): the host's own steps with `rope` in place of its own.
            `x` is a tensor, or an `Emitted` where the host has an Emission; `spare(linear, x)` makes such a one for a
            Linear that takes it, and is the tensor itself for others.
        stands_for: whether it stands for this attention module.
        rope: the chain, loaded when kernels are available.
        first_linear: name of the Linear that takes the hidden states, where there is but one.
        last_linear: name of the Linear that makes the result.
        takes: whether it may stand for the module in a call with these named arguments. The shadow runs attention a
            second time, which something that overrides it could notice; hooks and patches on modules are looked after.
    """

    forward: Callable[..., torch.Tensor]
    stands_for: Callable[[nn.Module], bool]
    rope: Callable[[], Chain]
    takes: Callable[[Mapping[str, Any]], bool] = lambda arguments: True
    first_linear: str | None = None
    last_linear: str | None = None


@dataclass(frozen=True)
class Host:
    """A host's own ways.

    Attributes:
        name: as it appears in a status line.
        norm_weight: opens an RMSNorm's weight for one use beside `x`, on its device and in its dtype. Weights are
            read in no other way, so that LoRA, offloading and paging keep working.
        attention: the host's attention, where its rope can be exchanged.
        emission: how its fp8 Linears take an input that is quantised already, where it has any.
        rests_on: what of its own, besides the modules, a proof rests on, as it is now; compared by identity.
    """

    name: str
    norm_weight: Callable[[nn.RMSNorm, torch.Tensor], AbstractContextManager[torch.Tensor]]
    attention: AttentionForm | None = None
    emission: Emission | None = None
    rests_on: Callable[[], Iterable[object]] = tuple
