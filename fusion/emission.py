"""Hidden states in fp8 for the Linears that multiply fp8, and what the host must say for that.

A Linear with fp8 weights and a constant input scale of 1 quantises its bf16 input before it multiplies. A kernel can
write the quantised values at once: half the bytes, and one launch less for every Linear. `high` hands fp8 also to
Linears whose weights have a scale for each row: their input then has one for each token; stock multiplies in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

FP8 = torch.float8_e4m3fn

# What a chain writes, as the arguments that follow its own: bf16, fp8 with scale 1, fp8 with a scale for each row.
Form = tuple[torch.dtype] | tuple[torch.dtype, bool]
BF16: Form = (torch.bfloat16,)
PLAIN: Form = (FP8,)
BY_ROWS: Form = (FP8, True)


class Multiply(Protocol):
    def __call__(self, linear: nn.Module, rows: torch.Tensor, scale: torch.Tensor, fast: bool) -> torch.Tensor:
        """What a Linear makes of an input in fp8.

        Args:
            linear: one that takes it.
            rows: [M, K] float8_e4m3fn.
            scale: float32 beside them: a one, or [M, 1] for a Linear that takes scales for each row.
            fast: whether the product may be one that is faster than the Linear's own, and not byte-equal to it.

        Returns:
            [M, N] bf16.
        """


@dataclass(frozen=True)
class Emission:
    """A host's fp8 Linears.

    Attributes:
        takes: whether a Linear, as it is now, would quantise its input with scale 1 to float8_e4m3fn: not with an input
            scale, another quantisation, a patch or a hook, nor with a LoRA unless `multiply` applies it as the Linear
            does.
        multiply: the product.
        quantise: [M, K] bf16 -> [M, K] float8_e4m3fn, as a Linear that `takes` does it.
        takes_rows: the same for fp8 weights with a scale for each row.
        no_rows: why a device has no product for those, or None.
        no_fast: why a device has no faster product, or None.
    """

    takes: Callable[[nn.Module], bool]
    multiply: Multiply
    quantise: Callable[[torch.Tensor], torch.Tensor]
    takes_rows: Callable[[nn.Module], bool] = lambda linear: False
    no_rows: Callable[[torch.device], str | None] = lambda device: None
    no_fast: Callable[[torch.device], str | None] = lambda device: None


class Emitted(NamedTuple):
    """Hidden states in fp8 on their way to Linears.

    Attributes:
        rows: [M, K] float8_e4m3fn.
        shape: of the hidden states without their last dimension; M in all.
        emission: whose Linears they are for.
        scale: float32 beside `rows`: a one, which would cost every Linear a launch if it were made anew, or [M, 1].
        fast: whether the product may be a faster one than stock's.
    """

    rows: torch.Tensor
    shape: torch.Size
    emission: Emission
    scale: torch.Tensor
    fast: bool = False


def run_linear(linear: nn.Module, x: torch.Tensor | Emitted) -> torch.Tensor:
    """A Linear on hidden states [..., K] in either form; [..., N]."""
    if isinstance(x, Emitted):
        return x.emission.multiply(linear, x.rows, x.scale, x.fast).view(*x.shape, -1)
    plain: torch.Tensor = linear(x)
    return plain
