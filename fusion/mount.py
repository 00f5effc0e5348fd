"""Mounts the sites of one model for the length of one call, and takes them off again whatever happens."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.modules.module as torch_modules
from torch import nn

from ..kernels.memory import is_out_of_memory
from .block_site import BlockSite
from .chains import BLOCK_CHAINS, FP8_INPUT, MODULATE, ROPE, SILU_MUL, Chain
from .emission import BF16, FP8, Form
from .exchange import EXCHANGE, exchanged_forwards, is_hooked, is_meddled_with, is_patched
from .fp8_inputs import Fp8Inputs
from .host import Host
from .inner_sites import AttentionSite, FeedForwardSite
from .marks import Marks
from .pieces import Pieces
from .proof import NO_ROOM, Ledger, log, paired, raised
from .site import Site, kind_of
from .structure import Structure, norms_hooked


@dataclass
class Call:
    """One call of a mounted model.

    Attributes:
        mount: what is mounted.
        compared: once it is over, whether it compared anything: what it gave is stock's, in part or whole, and may not
            be what the next one gives.
    """

    mount: Mount
    compared: bool = False


class Mount:
    """The sites of one model and the evidence of its current forward. One model runs one forward at a time.

    Args:
        structure: the model's blocks.
        host: whose they are.
        chains: by name.
        ledger: of the Fusion.
        pieces: of `high`.

    Attributes:
        fp8: what its Linears are given.
        stock_reason: why the model runs stock as long as nothing on it is exchanged, or None.
        settled: whether a comparison of it ever came to its end.
        starved: whether one found too little memory.
    """

    def __init__(
        self, structure: Structure, host: Host, chains: Mapping[str, Chain], ledger: Ledger, pieces: Pieces
    ) -> None:
        self.host = host
        self.ledger = ledger
        self.evidence = ledger.evidence()
        self.stock_reason: str | None = None
        self.settled = False
        self._values = 0  # of the hidden states, which all sites of a forward have as many of
        self._no_room = math.inf  # as many as could not be compared
        self._cut_short = False  # nothing that the current call has seen may prove anything
        self.block_count = len(structure.blocks)
        self._chains = chains
        self._runners = {name: partial(_run, chain, ledger) for name, chain in chains.items()}
        # Not `self.run`: a cycle would keep a model's weights until the collector comes.
        self.fp8 = Fp8Inputs(host.emission, self._runners.__getitem__, ledger, pieces)
        self._sites: tuple[tuple[tuple[str, ...], tuple[Site, ...]], ...] = (
            (BLOCK_CHAINS, tuple(BlockSite(b, self, structure.signature) for b in structure.blocks)),
            ((SILU_MUL,), tuple(FeedForwardSite(b.feed_forward, self) for b in structure.blocks)),
        )
        if host.attention is not None and all(host.attention.stands_for(b.attention) for b in structure.blocks):
            rope = tuple(AttentionSite(b.attention, self) for b in structure.blocks)
            self._sites += (((ROPE,), rope),)
        self._thread: int | None = None
        self._marks = Marks(structure.blocks, host.rests_on)
        self._first: Site | None = None
        # What holds for one forward, worked out where it is first asked for: blocks share most of their arguments.
        self._kinds: dict[int, tuple[Any, Hashable]] = {}

    @property
    def chain_names(self) -> tuple[str, ...]:
        """The chains that this model and host have a site for."""
        return tuple(name for names, _ in self._sites for name in names)

    def foreign(self, passed_over: Container[int] = ()) -> dict[str, str]:
        """Chains that are not ours to fuse now, since another pack patched or hooks a module on their way.

        Args:
            passed_over: ids of forwards that are not to count.
        """
        found: dict[str, str] = {}
        for names, sites in self._sites:
            for site in sites:
                module = site.module
                patched = is_patched(module) and id(module.__dict__["forward"]) not in passed_over
                if patched or (isinstance(site, BlockSite) and norms_hooked(module, passed_over)):
                    found.update(dict.fromkeys(names, f"another node patched {type(module).__name__}"))
                    break
        return found

    def begin(self, site: Site, values: int) -> None:
        """Forgets what held for the forward before, if `site` is the first of this one; a call may run several.

        Args:
            site: that is called.
            values: of the hidden states it is called with.
        """
        if site is self._first:
            self.fp8.begin()
            self._kinds.clear()
        if values:  # of every site, since the first may be left out; a call that is left to stock has none
            self._values = values

    def kind(self, value: Any) -> Hashable:
        """`kind_of` an argument that the blocks of one forward share."""
        known = self._kinds.get(id(value))
        if known is None or known[0] is not value:
            known = self._kinds[id(value)] = value, kind_of(value)
        return known[1]

    def attention_linears(self, attention: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
        """The first and the last Linear of an attention module, where the host names them."""
        form = self.host.attention
        names = (None, None) if form is None else (form.first_linear, form.last_linear)
        first, last = (None if name is None else attention._modules.get(name) for name in names)
        return first, last

    def emits(self, block: Any, attention_arguments: Mapping[str, Any]) -> tuple[Form, Form]:
        """What the block's norms write for its attention, and for its feed-forward.

        fp8 only where the module that receives it is one of ours for this call, and nothing hooks it.
        """
        if MODULATE in self.ledger.refused:
            return BF16, BF16  # the eager form would take two more passes over memory than the Linear itself
        # By the dictionaries: `getattr` of a module takes ten times as long, and a block asks for eight.
        parts = block._modules
        attention, ffn = parts["attention"], parts["feed_forward"]
        layers = ffn._modules
        to_attention = to_feed_forward = BF16
        if type(attention.__dict__.get("forward")) is AttentionSite:
            form = self.fp8.form(self.attention_linears(attention)[0])
            if form != BF16 and self.takes_attention(attention, attention_arguments):
                to_attention = form
        if type(ffn.__dict__.get("forward")) is FeedForwardSite and not is_hooked(ffn):
            form = self.fp8.form(layers["w1"])
            if form == self.fp8.form(layers["w3"]):
                to_feed_forward = form
        return to_attention, to_feed_forward

    def takes_attention(self, attention: nn.Module, arguments: Mapping[str, Any]) -> bool:
        """Whether the host's written-out attention stands for this module in a call with these named arguments."""
        form = self.host.attention
        return (
            form is not None
            and ROPE not in self.ledger.refused  # which also says that the written-out form is not the module's own
            and not is_hooked(attention)
            and form.takes(arguments)
            and not any(layer is not None and is_meddled_with(layer) for layer in attention._modules.values())
        )

    def run(self, name: str) -> Callable[..., Any]:
        """A chain in the form in which it runs now: its kernel, or its eager form once it is refused."""
        return self._runners[name]

    def compare(self, name: str) -> Callable[..., Any]:
        """A chain that runs both forms, notes whether they are equal, and returns the eager one."""
        chain = self._chains[name]
        count = self.evidence.count(name)

        def both(*args: Any) -> Any:
            eager = chain.eager(*args)
            if name in self.ledger.refused:
                return eager
            try:
                for ours, theirs in paired(chain.fused(*args), eager):
                    count.add(ours, theirs)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.ledger.refuse(name, raised(error))
            return eager

        return both

    def compare_emission(self, name: str, *stock: torch.Tensor) -> Callable[..., None]:
        """A chain that runs its kernel for fp8, and notes whether its results are stock's.

        Args:
            name: of the chain.
            stock: its results in bf16, [B, T, K]; of the last, what the host quantises it to is compared.
        """
        emission, chain = self.host.emission, self._chains[name]
        assert emission is not None  # asked for only where a Linear takes fp8

        def emit(*args: Any) -> None:
            if FP8_INPUT in self.ledger.refused or name in self.ledger.refused:
                return
            ours = self._tried(lambda: chain.fused(*args, FP8))
            if ours is None:
                return
            count = self.evidence.count(FP8_INPUT)
            *plain, last = stock
            *others, quantised = ours if isinstance(ours, tuple) else (ours,)
            for mine, theirs in zip(others, plain, strict=True):
                count.add(mine, theirs)
            count.add(quantised.flatten(0, 1), emission.quantise(last.flatten(0, 1)))

        return emit

    def compare_spared(self, spared: Callable[[], torch.Tensor], stock: torch.Tensor) -> None:
        """Notes whether Linears that are given fp8 make the same of it as stock, [B, T, N]."""
        if FP8_INPUT in self.ledger.refused:
            return
        ours = self._tried(spared)
        if ours is not None:
            self.evidence.count(FP8_INPUT).add(ours, stock, through_fp8=True)

    def _tried(self, form: Callable[[], Any]) -> Any:
        """What a form with fp8 in it gives; None where it raised, after which there is no more fp8."""
        try:
            return form()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.ledger.refuse(FP8_INPUT, raised(error))
            return None

    def serves(self) -> bool:
        """Whether the sites are to do anything for the caller: mounted by this thread, on a model that may be fused."""
        return self._thread == threading.get_ident() and self.stock_reason is None and not self._cut_short

    def may_compare(self) -> bool:
        """Whether a forward of this size is to be compared with stock: not if so large a one found no room for it."""
        return self._values < self._no_room

    @property
    def starved(self) -> bool:
        return self._no_room < math.inf

    def stop_comparing(self) -> None:
        """Stock had enough memory: its image is not to be lost over the comparison. A smaller one may be compared."""
        if not self.starved:
            log.warning("Ideogram 4 fusion: %s", NO_ROOM)
        self._no_room = min(self._no_room, self._values)
        self._cut_short = True
        self.ledger.revision += 1

    def run_stock(self, reason: str) -> None:
        """Leaves the model to the host, and says so once."""
        if self.stock_reason is None:
            self.stock_reason = reason
            self.ledger.revision += 1
            log.warning("Ideogram 4 fusion: the model runs stock: %s", reason)

    def outdated(self) -> bool:
        """Whether something on the model was exchanged since its sites were made, so that no proof of theirs holds."""
        return not self._taken() and not self._marks.hold()

    @contextlib.contextmanager
    def active(self) -> Iterator[Call]:
        """Exchanges the forwards. Settles the evidence of a call that came to its end; one cut short proves nothing.

        While another thread, or an outer call, has sites on the model, this one runs through it as it finds it; so it
        does where hooks on all modules want to see those that the kernels skip.
        """
        with contextlib.ExitStack() as exchanged:
            with EXCHANGE:
                mine = not self._taken() and not _hooked_everywhere()
                if mine:
                    foreign = self.foreign()
                    groups = [(names, group) for names, group in self._sites if names[0] not in foreign]
                    sites = [site for _, group in groups for site in group]
                    self._first = sites[0] if sites else None
                    self.evidence = self.ledger.evidence()
                    self._cut_short = False
                    self._thread = threading.get_ident()
                    exchanged.enter_context(exchanged_forwards({site.module: site for site in sites}))
            call = Call(self)
            try:
                yield call
                if mine:  # while its sites are still on, so that no other thread begins before it is settled
                    call.compared = bool(self.evidence.witnesses) or self._cut_short
                    try:
                        self._settle()
                    except Exception as error:
                        if not is_out_of_memory(error):
                            raise
                        self.stop_comparing()
            finally:
                if mine:
                    self._thread = None
                    self.fp8.end()
                    self._kinds.clear()

    def _settle(self) -> None:
        """Draws the conclusions of a call that came to its end."""
        evidence, self.evidence = self.evidence, self.ledger.evidence()
        if not evidence.witnesses or self.stock_reason is not None or self._cut_short:
            return
        if unequal := evidence.structure.total():
            self.run_stock(
                f"the blocks compute something else than their parts suggest, or do not repeat themselves "
                f"({unequal:,} of {evidence.structure.compared:,} values differ from stock)"
            )
            return
        self.ledger.settle(evidence)
        self.settled = True

    def _taken(self) -> bool:
        return any(isinstance(s.module.__dict__.get("forward"), Site) for _, group in self._sites for s in group)


def _hooked_everywhere() -> bool:
    return any(getattr(torch_modules, f"_global_{name}", None) for name in ("forward_hooks", "forward_pre_hooks"))


def _run(chain: Chain, ledger: Ledger, *args: Any) -> Any:
    if chain.name in ledger.refused:
        return chain.eager(*args)
    try:
        return chain.fused(*args)
    except Exception as error:
        # What a launch lacks lies outside PyTorch's pool, in which there may be room; no host frees any for it.
        if not is_out_of_memory(error):
            ledger.refuse(chain.name, raised(error))
    return chain.eager(*args)  # a chain is pure: this is what the kernel owes
