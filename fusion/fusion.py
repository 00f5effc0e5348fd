"""Fusion at one quality: what a quality node makes, mounts on models and asks for a status."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from ..kernels.availability import unavailable
from .chains import FP8_INPUT, ROPE, ROWS_INPUT, Chain, load_chains, quantise_chain, quantise_rows_chain
from .host import Host
from .mount import Call, Mount
from .pieces import ALL, NONE, Pieces
from .proof import NO_ROOM, Ledger, log
from .self_test import self_test
from .structure import Structure, inspect_model

OFF, LOSSLESS, HIGH = "off", "lossless", "high"
QUALITIES = (OFF, LOSSLESS, HIGH)

Result = TypeVar("Result")

_FORWARDS = 8  # at most for one call: one for each chain that can be refused, and the last
_OFTEN = 8  # proofs lost before it is said: another pack's patch or two come and go in any session


class Fusion:
    """Fuses the blocks of every model it is mounted on, at one quality.

    Args:
        quality: `lossless` (a chain is fused once it is proven byte-equal to stock) or `high` (which adds `pieces`).
        host: who owns the models.
        device: where they run.
        dtype: what they compute in; the kernels take bfloat16.
        chains: the chains to fuse; those of `kernels/` where None.
        pieces: of `high`; attention is the host's to choose.

    Attributes:
        chosen: `pieces`, at either quality.
        pieces: those of them that the quality has: none at `lossless`.

    Raises:
        ValueError: any other quality. `off` is the absence of a Fusion.
    """

    def __init__(
        self,
        quality: str,
        host: Host,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        chains: Mapping[str, Chain] | None = None,
        pieces: Pieces = ALL,
    ) -> None:
        if quality not in (LOSSLESS, HIGH):
            raise ValueError(f"quality {quality!r} is neither {LOSSLESS} nor {HIGH}")
        self.quality = quality
        self.host = host
        self.device = device
        self.chosen = pieces
        self.pieces = pieces if quality == HIGH else NONE
        self._pieces = self.pieces  # those that the device can do
        self._no_fast: str | None = None
        reason = unavailable(device)
        if reason is None and dtype != torch.bfloat16:
            reason = f"the model computes in {str(dtype).removeprefix('torch.')} here, the kernels in bfloat16"
        self.ledger = Ledger(exact=not self.pieces.unproven_chains, stock_reason=reason)
        self._chains: dict[str, Chain] = {}
        if self.ledger.stock_reason is None:
            self._chains = dict(load_chains() if chains is None else chains)
            if host.attention is not None:
                self._chains.setdefault(ROPE, host.attention.rope())
            if host.emission is not None:
                self._chains.setdefault(FP8_INPUT, quantise_chain(host.emission.quantise))
                self._chains.setdefault(ROWS_INPUT, quantise_rows_chain())
                if self.pieces.fast_accumulation and (why := host.emission.no_fast(device)) is not None:
                    self._no_fast = why
                    self._pieces = replace(self.pieces, fast_accumulation=False)
                if self.pieces.row_wise_fp8 and (why := host.emission.no_rows(device)) is not None:
                    self.ledger.refused[ROWS_INPUT] = why
            inexact = {name: why for name, chain in self._chains.items() if (why := chain.inexact(device)) is not None}
            self.ledger.unprovable = frozenset(inexact)
            if self.ledger.exact:
                self.ledger.refused.update(inexact)
        self._mounts: weakref.WeakKeyDictionary[nn.Module, Mount] = weakref.WeakKeyDictionary()
        self._outdated = 0
        # Why a model could not be fused when it was last looked at.
        self._declined: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()

    def self_test(self, root: nn.Module) -> None:
        """Tries every chain that `root` has a site for on random numbers of its sizes; the status tells the outcome."""
        mount = self._mount(root)
        if isinstance(mount, Mount):
            norm = inspect_model(root).blocks[0].attention_norm1
            self_test(
                self.ledger, self._chains, mount.chain_names, self.device, norm.normalized_shape[0], float(norm.eps)
            )

    @contextlib.contextmanager
    def mounted(self, root: nn.Module) -> Iterator[Call | None]:
        """Fuses the blocks below `root` inside the context; outside, nothing of it is left on the model."""
        mount = self._mount(root)
        if isinstance(mount, str):
            yield None
        else:
            with mount.active() as call:
                yield call

    def run(
        self, root: nn.Module, forward: Callable[[], Result], may_repeat: Callable[[], bool] = lambda: True
    ) -> Result:
        """`forward()` with `root` fused.

        A forward that compares gives what stock gives. Where that is not what the next one gives, it is run once more,
        so that a seed gives the same picture the first time too; and again if what it refused left something else to
        compare.

        Args:
            root: the model.
            forward: runs it.
            may_repeat: whether it may be run more than once; asked only before it would be.
        """
        for _ in range(_FORWARDS):
            with self.mounted(root) as call:
                out = forward()
            if call is None or not call.compared or not self._inexact(call.mount) or not may_repeat():
                break
        return out

    def _accumulates_fast(self) -> bool:
        """Whether it has fp8 products in stock's place, and they are not stock's."""
        has_products = FP8_INPUT in self.ledger.differing and FP8_INPUT not in self.ledger.refused
        return self._pieces.fast_accumulation and has_products

    def _inexact(self, mount: Mount) -> bool:
        """Whether its next forward on `mount` may give something else than stock."""
        refused = self.ledger.refused
        differing = {chain for chain, (unequal, _) in self.ledger.differing.items() if unequal}
        undecided = self.ledger.deferred and (self._pieces.fast_accumulation or not self.ledger.exact)
        by_rows = mount.fp8.by_rows and ROWS_INPUT not in refused
        return bool(differing - refused.keys()) or undecided or self._accumulates_fast() or by_rows

    def status(
        self, root: nn.Module, foreign: Mapping[str, str] | None = None, passed_over: Container[int] = ()
    ) -> str:
        """One line: what is mounted on `root`, what is exact, and why the rest is not.

        Args:
            root: the model.
            foreign: chain -> reason, for patches that another node will have put on the model by its next forward.
            passed_over: ids of forwards on the model that will be gone by then.
        """
        mount = self._told(root)
        if isinstance(mount, str):
            return f"stock: {mount}"
        aside = {**mount.foreign(passed_over), **(foreign or {}), **self.ledger.refused}
        seen = FP8_INPUT in self.ledger.differing or FP8_INPUT in self.ledger.refused
        names = mount.chain_names + ((FP8_INPUT,) if seen else ())
        states: dict[str, list[str]] = {}
        for name in sorted(names, key=aside.__contains__):
            state = f"stock ({aside[name]})" if name in aside else self._state(name)
            states.setdefault(state, []).append(name)
        parts = [f"{', '.join(group)} {state}" for state, group in states.items()]
        if self._accumulates_fast():
            parts.append("fp8 products with fast accumulation")
        if self._no_fast is not None and FP8_INPUT in self.ledger.differing:
            parts.append(f"fp8 products without fast accumulation ({self._no_fast})")
        if self.quality == HIGH and mount.settled and FP8_INPUT not in names and not mount.fp8.by_rows:
            parts.append("no products in fp8")
        if self.pieces.row_wise_fp8 and mount.fp8.by_rows:
            why = self.ledger.refused.get(ROWS_INPUT)
            fast = " with fast accumulation" if self._pieces.fast_accumulation else ""
            parts.append(f"products of row-wise fp8{fast}" if why is None else f"row-wise fp8 dequantised ({why})")
        if ROPE not in mount.chain_names:
            parts.append(f"rope: {self.host.name}'s own")
        if mount.starved:
            parts.append(f"some inputs may be stock ({NO_ROOM})")
        return f"{self.quality}: {mount.block_count}/{mount.block_count} blocks; {'; '.join(parts)}"

    def unfused_reason(self, root: nn.Module) -> str | None:
        """Why not one chain of `root` runs its kernel, or None where one does."""
        mount = self._told(root)
        if isinstance(mount, str):
            return mount
        aside = {**mount.foreign(), **self.ledger.refused}
        left = [name for name in mount.chain_names if name not in aside]
        return None if left else "; ".join(f"{name}: {aside[name]}" for name in mount.chain_names)

    def _state(self, chain: str) -> str:
        if chain in self.ledger.proven:
            return "exact"
        if self.ledger.exact:
            return "to be proven on the first step"
        unequal, compared = self.ledger.differing.get(chain, (0, 0))
        return f"fused ({unequal:,} of {compared:,} values differed when last compared)" if compared else "fused"

    def _mount(self, root: nn.Module) -> Mount | str:
        """The sites of a model, made anew where something on it was exchanged, or the reason why it has none.

        Reasons are not kept: what stands on a model for one clone is off again for the next. Nor are sites that no
        longer fit, which would keep the modules that were exchanged.
        """
        if self.ledger.stock_reason is not None:
            return self.ledger.stock_reason
        mount = self._mounts.get(root)
        if mount is not None and mount.outdated():
            if self._mounts.get(root) is mount:  # and not what another thread has just made
                self._mounts.pop(root, None)
            mount = None
            self._outdated += 1
            if self._outdated == _OFTEN:
                log.warning("Ideogram 4 fusion: the model's blocks keep changing, and are proven anew each time")
        if mount is None:
            structure: Structure = inspect_model(root)
            if structure.declined != self._declined.get(root):
                self._declined[root] = structure.declined
                self.ledger.revision += 1
            if structure.declined is not None:
                return structure.declined
            mount = self._mounts[root] = Mount(structure, self.host, self._chains, self.ledger, self._pieces)
        return mount.stock_reason or mount

    def _told(self, root: nn.Module) -> Mount | str:
        """The same for a status line, which also says that nothing could be proven yet."""
        mount = self._mount(root)
        starved = isinstance(mount, Mount) and mount.starved and not mount.settled
        return NO_ROOM if starved else mount
