"""Hidden states in fp8 for the Linears that would quantise them, and what the host must say for that.

A Linear with fp8 weights quantises its bf16 input before it multiplies. Where it does so with a constant scale of 1, a
kernel can write the quantised values at once: half the bytes, and one launch less for every Linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Emission:
    """A host's fp8 Linears.

    Attributes:
        takes: whether a Linear, as it is now, would quantise its input with scale 1 to float8_e4m3fn: not with a LoRA
            on it, an input scale, another quantisation, a patch or a hook.
        multiply: multiply(linear, rows [M, K] float8_e4m3fn, a float32 one beside them) -> [M, N] bf16, what such a
            Linear makes of an input that it has quantised.
        quantise: [M, K] bf16 -> [M, K] float8_e4m3fn, as such a Linear does it.
    """

    takes: Callable[[nn.Module], bool]
    multiply: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    quantise: Callable[[torch.Tensor], torch.Tensor]


class Emitted(NamedTuple):
    """Hidden states in fp8 on their way to Linears.

    Attributes:
        rows: [M, K] float8_e4m3fn.
        shape: of the hidden states without their last dimension; M in all.
        emission: whose Linears they are for.
        scale: a float32 one beside `rows`; making it anew for every Linear would cost a launch each.
    """

    rows: torch.Tensor
    shape: torch.Size
    emission: Emission
    scale: torch.Tensor


def run_linear(linear: nn.Module, x: torch.Tensor | Emitted) -> torch.Tensor:
    """A Linear on hidden states [..., K] in either form; [..., N]."""
    if isinstance(x, Emitted):
        return x.emission.multiply(linear, x.rows, x.scale).view(*x.shape, -1)
    plain: torch.Tensor = linear(x)
    return plain
