"""Mounts the sites of one model for the length of one call, and takes them off again whatever happens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from .chains import GATE, MODULATE, ROPE, SILU_MUL, Chain
from .exchange import exchanged_forwards, is_patched
from .host import Host
from .proof import Evidence, Ledger
from .sites import AttentionSite, BlockSite, FeedForwardSite, Site
from .structure import NORMS, Structure


class Mount:
    """The sites of one model and the evidence of its current forward. One model runs one forward at a time."""

    def __init__(self, structure: Structure, host: Host, chains: Mapping[str, Chain], ledger: Ledger) -> None:
        self.host = host
        self.ledger = ledger
        self.evidence = Evidence()
        self.block_count = len(structure.blocks)
        self._chains = chains
        self._runners = {name: partial(self._run, chain) for name, chain in chains.items()}
        self._sites: tuple[tuple[tuple[str, ...], tuple[Site, ...]], ...] = (
            ((MODULATE, GATE), tuple(BlockSite(b, self, structure.signature) for b in structure.blocks)),
            ((SILU_MUL,), tuple(FeedForwardSite(b.feed_forward, self) for b in structure.blocks)),
        )
        if host.attention_forward is not None and all(host.fusible_attention(b.attention) for b in structure.blocks):
            rope = tuple(AttentionSite(b.attention, self) for b in structure.blocks)
            self._sites += (((ROPE,), rope),)

    @property
    def chain_names(self) -> tuple[str, ...]:
        """The chains that this model and host have a site for."""
        return tuple(name for names, _ in self._sites for name in names)

    def foreign(self) -> dict[str, str]:
        """Chains that are not ours to fuse now, since another pack patched or hooks a module on their way."""
        found: dict[str, str] = {}
        for names, sites in self._sites:
            for site in sites:
                if is_patched(site.module) or (isinstance(site, BlockSite) and _norms_hooked(site.module)):
                    found.update(dict.fromkeys(names, f"another node patched {type(site.module).__name__}"))
                    break
        return found

    def run(self, name: str) -> Callable[..., torch.Tensor]:
        """A chain in the form in which it runs now: its kernel, or its eager form once it is refused."""
        return self._runners[name]

    def _run(self, chain: Chain, *args: object) -> torch.Tensor:
        if chain.name in self.ledger.refused:
            return chain.eager(*args)
        try:
            return chain.fused(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the chain is pure: its eager form gives what the kernel owes
            self.ledger.refuse(chain.name, _raised(error))
            return chain.eager(*args)

    def compare(self, name: str) -> Callable[..., torch.Tensor]:
        """A chain that runs both forms, notes whether they are equal, and returns the eager one."""
        chain = self._chains[name]
        count = self.evidence.count(name)

        def both(*args: object) -> torch.Tensor:
            eager = chain.eager(*args)
            if name in self.ledger.refused:
                return eager
            if reason := chain.decline(*args):
                self.ledger.refuse(name, reason)
                return eager
            try:
                count.add(chain.fused(*args), eager)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.ledger.refuse(name, _raised(error))
            return eager

        return both

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Exchanges the forwards. Settles the evidence of a call that came to its end; one cut short proves nothing."""
        foreign = self.foreign()
        sites = [site for names, group in self._sites if names[0] not in foreign for site in group]
        self.evidence = Evidence()
        with exchanged_forwards({site.module: site for site in sites}):
            yield
        if self.evidence.witnesses:
            self.ledger.settle(self.evidence)
            self.evidence = Evidence()


def _raised(error: Exception) -> str:
    return f"its kernel raised {type(error).__name__}: {str(error).strip()[:160]}"


def _norms_hooked(block: nn.Module) -> bool:
    norms: list[nn.Module] = [getattr(block, name) for name in NORMS]
    return any(is_patched(n) or n._forward_hooks or n._forward_pre_hooks for n in norms)
