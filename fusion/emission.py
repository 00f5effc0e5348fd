"""Hidden states that a chain wrote in fp8 for the Linears behind it, and what the host must say for that.

A Linear with fp8 weights quantises its bf16 input before it multiplies. Where it does so with a constant scale of 1, a
kernel can write the quantised values at once: half the bytes, and one launch less for every Linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Emission:
    """A host's fp8 Linears.

    Attributes:
        takes: whether a Linear, as it is now, would quantise its input with scale 1 to float8_e4m3fn: not with a LoRA
            on it, an input scale, another quantisation, a patch or a hook.
        wrap: [M, K] float8_e4m3fn and a float32 one beside it -> the input that such a Linear takes without quantising
            it again.
        quantise: [M, K] bf16 -> [M, K] float8_e4m3fn, as such a Linear does it.
    """

    takes: Callable[[nn.Module], bool]
    wrap: Callable[[torch.Tensor, torch.Tensor], Any]
    quantise: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Emitted:
    """Hidden states in fp8 on their way from one site of a block to the next.

    Attributes:
        data: [B, T, D] float8_e4m3fn.
        emission: whose Linears it is for.
        scale: a float32 one beside `data`; making it anew for every Linear would cost a launch each.
    """

    data: torch.Tensor
    emission: Emission
    scale: torch.Tensor


def run_linear(linear: nn.Module, x: torch.Tensor | Emitted) -> torch.Tensor:
    """A Linear on hidden states [B, T, D] in either form; [B, T, out]."""
    if isinstance(x, Emitted):
        out: torch.Tensor = linear(x.emission.wrap(x.data.flatten(0, 1), x.scale))
        return out.view(*x.data.shape[:-1], -1)
    plain: torch.Tensor = linear(x)
    return plain
