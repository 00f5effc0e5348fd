"""Runs every chain once on random numbers of the model's sizes, before its first image.

It compiles the kernels while nobody waits for a step, and lets a status line say what a GPU can do before anything was
sampled. The proof that counts is still the shadow of the first real forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..kernels.memory import is_out_of_memory
from .chains import GATE, MERGE, MODULATE, SILU_MUL, Chain
from .proof import Ledger, paired, raised

# Two images with a modulation of their own and an odd number of tokens: at the model's 4608 columns some 10 values
# would differ if a row were added up in another order (one in a million does, by simulation).
BATCH, TOKENS = 2, 1025


def self_test(
    ledger: Ledger, chains: Mapping[str, Chain], names: Iterable[str], device: torch.device, hidden: int, eps: float
) -> None:
    """Judges each named chain at hidden size `hidden`; refuses those that are unequal (lossless) or raise.

    The rope is left to the shadow: its arguments are the host's own.
    """
    try:
        arguments = _arguments(device, hidden, eps)
    except Exception as error:
        if is_out_of_memory(error):
            return  # says nothing about the kernels; the shadow forward will
        raise
    for name in names:
        if name in ledger.refused or name not in arguments:
            continue
        count = ledger.evidence().count(name)
        try:
            forms = chains[name].fused(*arguments[name]), chains[name].eager(*arguments[name])
            for ours, theirs in paired(*forms):
                count.add(ours, theirs)
        except Exception as error:
            if not is_out_of_memory(error):
                ledger.refuse(name, raised(error))
        else:
            ledger.judge(name, count)


def _arguments(device: torch.device, hidden: int, eps: float) -> dict[str, tuple[object, ...]]:
    """What each chain is called with."""
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    x, branch, weight = random(BATCH, TOKENS, hidden), random(BATCH, TOKENS, hidden), random(hidden)
    first, second, *_ = random(BATCH, 1, 4 * hidden).chunk(4, dim=-1)
    return {
        MODULATE: (x, weight, first, eps),
        GATE: (x, branch, weight, second, eps),
        SILU_MUL: (x, branch),
        MERGE: (x, branch, weight, second, weight, first, eps, eps),
    }
