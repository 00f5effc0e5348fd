"""Evidence that a fused chain equals the host's own, and what follows from it.

Evidence is gathered in shadow: stock runs, and each chain is computed beside it on the very tensors that stock saw.
Equality is that of bytes (-0.0 is not 0.0, a NaN equals only the same NaN). Counts stay on the device until the forward
is over, so that a shadow forward does not wait for the GPU after every chain (it does once a block, at attention).

What one forward can show: the norms of a 34-block forward over 512 tokens have 3e8 values, of which hundreds would
differ if a row were added up in any other order than ATen's. Sums whose order is known to differ are not left to chance
(`Chain.inexact`).
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..kernels.errors import KernelDeclined
from .chains import FP8_INPUT

log = logging.getLogger("ideogram4_fusion")

NO_ROOM = "too little memory to compare with stock"

# How far a tensor of an unequal chain may be from stock's, relative, and still be taken for another rounding of it. One
# step in every value is at most 2^-7 in bf16 and 2^-3 in fp8, where most values round alike; a wrong kernel is further
# off.
FARTHEST, FARTHEST_FP8 = 0.02, 0.1

_AT_ONCE = 1 << 24  # values whose distance is taken at once, in float32

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's values, each value's as one integer."""
    return x.contiguous().view(_INTEGER[x.element_size()])


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many values of two tensors differ in their bytes, as an int64 scalar on their device.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"{a.dtype} {list(a.shape)} cannot equal {b.dtype} {list(b.shape)}")
    return (as_integers(a) != as_integers(b)).sum()


def paired(ours: Any, theirs: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The results of a chain's two forms, tensor by tensor: each is a tensor or a tuple of tensors."""
    return zip(*(result if isinstance(result, tuple) else (result,) for result in (ours, theirs)), strict=True)


def raised(error: Exception) -> str:
    """An exception of a kernel as a reason, in one line."""
    if isinstance(error, KernelDeclined):
        return str(error)
    return f"its kernel raised {type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _far(a: torch.Tensor, b: torch.Tensor, farthest: float) -> torch.Tensor:
    """Relative L2 distance of `a` from `b` over the farthest that it may be, float32 on their device.

    NaN where one of them has a NaN; equal infinities are no distance.
    """
    off, whole = torch.zeros((), device=b.device), torch.zeros((), device=b.device)
    for ours, theirs in zip(a.reshape(-1).split(_AT_ONCE), b.reshape(-1).split(_AT_ONCE), strict=True):
        x, y = ours.float(), theirs.float()
        off += (x - y).where(x != y, 0.0).square().sum()
        whole += y.where(y.isfinite(), 0.0).square().sum()
    return torch.where(off == 0.0, 0.0, (off / whole).sqrt() / farthest)


@dataclass
class Count:
    """Values compared so far, and the differing ones among them, still on the device.

    Attributes:
        measured: whether it keeps how far the tensors are from stock too.
    """

    measured: bool = False
    compared: int = 0
    unequal: list[torch.Tensor] = field(default_factory=list)
    far: list[torch.Tensor] = field(default_factory=list)

    def add(self, a: torch.Tensor, b: torch.Tensor, through_fp8: bool = False) -> None:
        """Takes a tensor and stock's; `through_fp8` where it was computed from what was rounded to fp8."""
        self.unequal.append(differing(a, b))
        self.compared += a.numel()
        if self.measured:
            coarse = through_fp8 or a.element_size() == 1
            self.far.append(_far(a, b, FARTHEST_FP8 if coarse else FARTHEST))

    def total(self) -> int:
        return int(_together(self.unequal).sum()) if self.unequal else 0

    def farthest(self) -> float:
        """The largest distance of any tensor, over the farthest that it may be; NaN where a value is one."""
        return float(_together(self.far).max()) if self.far else 0.0


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    # A model may be spread over several devices.
    return torch.stack([part.to(parts[0].device) for part in parts])


@dataclass
class Evidence:
    """What one shadow forward saw.

    Attributes:
        chains: kernels against their eager forms.
        forms: modules written out by the host adapter against the host's own, by the chain that needs them.
        structure: the blocks, put together as Ideogram 4 does, against the host's own.
        witnesses: what is proven if all that is equal.
        measured: whether chains that differ are to be told how far.
    """

    measured: bool = False
    chains: dict[str, Count] = field(default_factory=dict)
    forms: dict[str, Count] = field(default_factory=dict)
    structure: Count = field(default_factory=Count)
    witnesses: list[tuple[set[Hashable], Hashable]] = field(default_factory=list)

    def count(self, chain: str) -> Count:
        return self.chains.setdefault(chain, Count(self.measured))

    def form(self, chain: str) -> Count:
        return self.forms.setdefault(chain, Count())


@dataclass
class Ledger:
    """What one Fusion has learnt about its chains: those it refuses and why, those that are proven.

    Attributes:
        exact: refuses a chain that differs anywhere, and not only one that fails to run or is far off.
        refused: chain -> reason; such a chain runs its eager form from then on.
        differing: chain -> (differing, compared) of the last comparison.
        unprovable: chains that cannot be equal here in principle, whatever a comparison shows.
        proven: chains that a whole shadow forward or a self-test found equal, and none found to differ.
        unequal: chains that ever differed and were kept.
        deferred: whether the last one left fp8 to be compared again, without a chain that it refused.
        stock_reason: why no model can be fused here, or None.
        revision: counts the conclusions drawn so far; a status is worth telling again when it has moved.
    """

    exact: bool
    refused: dict[str, str] = field(default_factory=dict)
    differing: dict[str, tuple[int, int]] = field(default_factory=dict)
    proven: set[str] = field(default_factory=set)
    unequal: set[str] = field(default_factory=set)
    unprovable: frozenset[str] = frozenset()
    deferred: bool = False
    stock_reason: str | None = None
    revision: int = 0

    def evidence(self) -> Evidence:
        """What a comparison is to be noted in, so that it can be judged."""
        return Evidence(measured=not self.exact)

    def refuse(self, chain: str, reason: str) -> None:
        """Sends a chain back to its eager form, and says so once."""
        if chain not in self.refused:
            self.refused[chain] = reason
            self.revision += 1
            self.proven.discard(chain)
            log.warning("Ideogram 4 fusion: %s runs stock: %s", chain, reason)

    def judge(self, chain: str, count: Count) -> None:
        """Takes the outcome of a comparison of one chain, counted in an `evidence` of this ledger."""
        unequal = count.total()
        self.differing[chain] = (unequal, count.compared)
        if unequal and self.exact:
            self.refuse(chain, f"{unequal:,} of {count.compared:,} values differ")
        elif unequal and not (far := count.farthest()) <= 1.0:
            self.refuse(chain, f"it is {far:.1f} times as far off as another rounding would be")
        elif unequal:
            self.unequal.add(chain)
            self.proven.discard(chain)
        elif count.compared and chain not in {*self.refused, *self.unprovable, *self.unequal}:
            self.proven.add(chain)

    def settle(self, evidence: Evidence) -> None:
        """Draws the conclusions of a shadow forward that came to its end, of blocks that are what they seem."""
        self.revision += 1
        self.deferred = False
        before = len(self.refused)
        for chain, count in evidence.forms.items():
            if unequal := count.total():
                self.refuse(chain, f"{unequal:,} of {count.compared:,} values of the module around it differ")
        spared = evidence.chains.pop(FP8_INPUT, None)
        for chain, count in evidence.chains.items():
            self.judge(chain, count)
        if spared is not None:
            if len(self.refused) > before and spared.total():
                self.deferred = True  # the chains that write fp8 are compared again without the one just refused
                return
            self.judge(FP8_INPUT, spared)
        for proven, signature in evidence.witnesses:
            proven.add(signature)
