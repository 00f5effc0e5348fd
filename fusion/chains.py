"""The chains of a block: for each its kernel and its eager form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MODULATE, GATE, MERGE, SILU_MUL, ROPE = "modulate", "gate", "gate+modulate", "silu-mul", "rope"
BLOCK_CHAINS = (MODULATE, GATE, MERGE)  # those around the parts of a block, which stand or fall together
FP8_INPUT = "fp8 input"  # what the next Linear would quantise, quantised before it: by the other chains, or by itself
ROWS_INPUT = "row-wise fp8 input"  # the same for Linears with a scale for each row, where stock multiplies in bf16


@dataclass(frozen=True)
class Chain:
    """One chain. Both forms take the same arguments by position, and return a tensor or a tuple of tensors.

    Attributes:
        name: as it appears in a status line.
        eager: the chain in PyTorch operations, as the host runs it.
        fused: its kernel; raises KernelDeclined for arguments that it does not take.
        inexact: why the kernel cannot equal its eager form on a device, whatever a comparison shows, or None.
    """

    name: str
    eager: Callable[..., Any]
    fused: Callable[..., Any]
    inexact: Callable[[torch.device], str | None] = lambda device: None


def load_chains() -> Mapping[str, Chain]:
    """The chains that every host has, by name. Imports Triton, so call it only where kernels are available."""
    from ..kernels import rms_norm_gate as gate
    from ..kernels import rms_norm_gate_modulate as merge
    from ..kernels import rms_norm_modulate as modulate
    from ..kernels import silu_mul
    from ..kernels.launch import Prepared
    from ..kernels.rows import inexact_sum

    chains = (
        Chain(MODULATE, modulate.rms_norm_modulate_reference, Prepared(modulate.prepare), inexact_sum),
        Chain(GATE, gate.rms_norm_gate_reference, Prepared(gate.prepare), inexact_sum),
        Chain(MERGE, merge.rms_norm_gate_modulate_reference, Prepared(merge.prepare), inexact_sum),
        Chain(SILU_MUL, silu_mul.silu_mul_reference, Prepared(silu_mul.prepare)),
    )
    return {chain.name: chain for chain in chains}


def quantise_rows_chain() -> Chain:
    """[M, K] bf16 -> float8_e4m3fn and [M] float32 scales. Imports Triton."""
    from ..kernels import quantise
    from ..kernels.launch import Prepared
    from ..kernels.row_scaling import scale_rows_reference

    return Chain(ROWS_INPUT, scale_rows_reference, Prepared(quantise.prepare_by_rows))


def quantise_chain(eager: Callable[[torch.Tensor], torch.Tensor]) -> Chain:
    """[M, K] bf16 -> float8_e4m3fn; `eager` is how a host's Linears do it. Imports Triton."""
    from ..kernels import quantise
    from ..kernels.launch import Prepared

    return Chain(FP8_INPUT, eager, Prepared(quantise.prepare))
