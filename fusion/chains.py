"""The chains of a block: for each its kernel, its eager form and what its kernel declines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MODULATE, GATE, MERGE, SILU_MUL, ROPE = "modulate", "gate", "gate+modulate", "silu-mul", "rope"
FP8_INPUT = "fp8 input"  # no chain of its own: the others writing what the next Linear would quantise


@dataclass(frozen=True)
class Chain:
    """One chain. All three functions take the same arguments, and return a tensor or a tuple of tensors.

    Attributes:
        name: as it appears in a status line.
        eager: the chain in PyTorch operations, as the host runs it.
        fused: its kernel, without checks.
        decline: why the kernel does not take the arguments, or None.
        inexact: why the kernel cannot equal its eager form on a device, whatever a comparison shows, or None.
    """

    name: str
    eager: Callable[..., Any]
    fused: Callable[..., Any]
    decline: Callable[..., str | None]
    inexact: Callable[[torch.device], str | None] = lambda device: None


def load_chains() -> Mapping[str, Chain]:
    """The chains that every host has, by name. Imports Triton, so call it only where kernels are available."""
    from ..kernels import rms_norm_gate, rms_norm_gate_modulate, rms_norm_modulate, silu_mul
    from ..kernels.rows import inexact_sum

    chains = (
        Chain(
            MODULATE,
            rms_norm_modulate.rms_norm_modulate_reference,
            rms_norm_modulate.launch_rms_norm_modulate,
            rms_norm_modulate.decline,
            inexact_sum,
        ),
        Chain(
            GATE,
            rms_norm_gate.rms_norm_gate_reference,
            rms_norm_gate.launch_rms_norm_gate,
            rms_norm_gate.decline,
            inexact_sum,
        ),
        Chain(
            MERGE,
            rms_norm_gate_modulate.rms_norm_gate_modulate_reference,
            rms_norm_gate_modulate.launch_rms_norm_gate_modulate,
            rms_norm_gate_modulate.decline,
            inexact_sum,
        ),
        Chain(SILU_MUL, silu_mul.silu_mul_reference, silu_mul.launch_silu_mul, silu_mul.decline),
    )
    return {chain.name: chain for chain in chains}
