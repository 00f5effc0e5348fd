"""The block: modulate in front of attention and feed-forward, gate behind them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .chains import GATE, MERGE, MODULATE
from .emission import BF16, BY_ROWS, PLAIN, Emitted, Form, run_linear
from .site import Site, first_argument, form_of
from .structure import BlockCall, BlockSignature, norms_hooked

if TYPE_CHECKING:
    from .mount import Mount


class BlockSite(Site):
    """The block: modulate in front of attention and feed-forward, gate behind them."""

    def __init__(self, module: nn.Module, mount: Mount, signature: BlockSignature) -> None:
        super().__init__(module, mount)
        self._signature = signature
        # What the host hands to attention by position behind the hidden states; another pack's attention may know the
        # arguments under other names.
        self._by_position: tuple[str, ...] = ()

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[BlockCall, tuple[Form, Form]]:
        """The call, and what its attention and its feed-forward are to be given."""
        call = self._signature.bind(args, kwargs)
        return call, self.mount.emits(self.module, call.attention)

    def signature(self, call: tuple[BlockCall, tuple[Form, Form]]) -> Hashable:
        (block_call, (to_attention, to_feed_forward)), mount = call, self.mount
        parts: Any = self.module._modules
        form = mount.fp8.form
        # Where fp8 is handed on, the inner sites do not ask for a proof of their own.
        spared = (
            form(parts["adaln_modulation"]),
            to_attention != BF16 and form(mount.attention_linears(parts["attention"])[1]),
            to_feed_forward != BF16 and form(parts["feed_forward"]._modules["w2"]),
        )
        shared = tuple(map(mount.kind, block_call.attention.values()))
        adaln_input = block_call.adaln_input
        return form_of(block_call.x), adaln_input.shape[-1], mount.kind(adaln_input), shared, call[1], spared

    def obstructed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return norms_hooked(self.module)  # by something that came inside the call; Mount looks before it

    def _norm(
        self, chain: Callable[..., Any], norm: nn.RMSNorm, m: torch.Tensor, *hidden: Any, more: tuple[Any, ...] = ()
    ) -> Any:
        """A chain around one norm, its weight opened for it; `more` are arguments behind eps."""
        with self.mount.host.norm_weight(norm, hidden[-1]) as weight:
            return chain(*hidden, weight, m, norm.eps, *more)

    def _merge(
        self,
        chain: Callable[..., Any],
        x: torch.Tensor,
        branch: torch.Tensor,
        gate: torch.Tensor,
        scale: torch.Tensor,
        more: tuple[Any, ...] = (),
    ) -> Any:
        """A chain around the norm behind attention and the one in front of the feed-forward."""
        block: Any = self.module
        after, before = block.attention_norm2, block.ffn_norm1
        weight_of = self.mount.host.norm_weight
        with weight_of(after, branch) as weight, weight_of(before, branch) as following:
            return chain(x, branch, weight, gate, following, scale, after.eps, before.eps, *more)

    def fused(self, call: tuple[BlockCall, tuple[Form, Form]]) -> torch.Tensor:
        block: Any = self.module
        mount = self.mount
        (block_call, (to_attention, to_feed_forward)), x = call, call[0].x
        adaln_input = mount.fp8.spare_shared(block.adaln_modulation, block_call.adaln_input)
        scale_msa, gate_msa, scale_mlp, gate_mlp = _modulation(run_linear(block.adaln_modulation, adaln_input))
        h = self._norm(mount.run(MODULATE), block.attention_norm1, scale_msa, x, more=to_attention)
        named = dict(block_call.attention)
        by_position = [named.pop(name) for name in self._by_position]
        h = block.attention(h if to_attention == BF16 else mount.fp8.emitted(h), *by_position, **named)
        x, h = self._gate_modulate(x, h, gate_msa, scale_mlp, to_feed_forward)
        h = block.feed_forward(h if to_feed_forward == BF16 else mount.fp8.emitted(h))
        gated: torch.Tensor = self._norm(mount.run(GATE), block.ffn_norm2, gate_mlp, x, h)
        return gated

    def _gate_modulate(
        self, x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor, form: Form
    ) -> tuple[torch.Tensor, Any]:
        """The gate behind attention and the modulated norm behind it: one kernel, or two where that one is refused."""
        block: Any = self.module
        refused = self.mount.ledger.refused
        if MERGE in refused or MODULATE in refused or GATE in refused:
            x = self._norm(self.mount.run(GATE), block.attention_norm2, gate, x, branch)
            return x, self._norm(self.mount.run(MODULATE), block.ffn_norm1, scale, x, more=form)
        gated, *out = self._merge(self.mount.run(MERGE), x, branch, gate, scale, more=form)
        return gated, tuple(out) if form == BY_ROWS else out[0]

    def shadow(
        self, call: tuple[BlockCall, tuple[Form, Form]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        block: Any = self.module
        evidence = self.mount.evidence
        block_call, (to_attention, to_feed_forward) = call
        adaln_input, attention = block_call.adaln_input, block_call.attention
        modulate, gate, merge = (self.mount.compare(name) for name in (MODULATE, GATE, MERGE))
        modulation: list[torch.Tensor] = []
        x = block_call.x
        ffn_out: torch.Tensor | None = None
        merged: list[torch.Tensor] = []  # residual and branch of the gate behind attention

        def see_modulation(given: tuple[Any, ...], named: dict[str, Any], out: torch.Tensor) -> None:
            if first_argument(given, named) is not adaln_input or modulation:
                raise LookupError("adaln_modulation was called otherwise")
            modulation.extend(_modulation(out))
            spared = self.mount.fp8.spare_shared(block.adaln_modulation, adaln_input)
            if isinstance(spared, Emitted):
                self.mount.compare_spared(lambda: run_linear(block.adaln_modulation, spared), out)

        def see_attention(given: tuple[Any, ...], named: dict[str, Any], out: torch.Tensor) -> None:
            nonlocal x
            rest = named if given else dict(list(named.items())[1:])
            by_position = _names_of(given[1:], rest, attention)
            if by_position is None:
                self.mount.run_stock(f"{type(block).__name__} hands its attention other arguments than its own")
            else:
                self._by_position = by_position
            seen = first_argument(given, named)
            evidence.structure.add(self._norm(modulate, block.attention_norm1, modulation[0], x), seen)
            if to_attention == PLAIN:
                emit = self.mount.compare_emission(MODULATE, seen)
                self._norm(emit, block.attention_norm1, modulation[0], x)
            elif to_attention == BY_ROWS:
                self._norm(modulate, block.attention_norm1, modulation[0], x, more=BY_ROWS)
            self._merge(merge, x, out, modulation[1], modulation[2])
            merged.extend((x, out))
            x = self._norm(gate, block.attention_norm2, modulation[1], x, out)

        def see_feed_forward(given: tuple[Any, ...], named: dict[str, Any], out: torch.Tensor) -> None:
            nonlocal ffn_out
            seen = first_argument(given, named)
            evidence.structure.add(self._norm(modulate, block.ffn_norm1, modulation[2], x), seen)
            if to_feed_forward == PLAIN:
                self._norm(self.mount.compare_emission(MODULATE, seen), block.ffn_norm1, modulation[2], x)
                residual, branch = merged
                self._merge(self.mount.compare_emission(MERGE, x, seen), residual, branch, modulation[1], modulation[2])
            elif to_feed_forward == BY_ROWS:
                residual, branch = merged
                self._merge(merge, residual, branch, modulation[1], modulation[2], more=BY_ROWS)
            merged.clear()
            ffn_out = out

        with (
            self.watched(block.adaln_modulation, see_modulation),
            self.watched(block.attention, see_attention),
            self.watched(block.feed_forward, see_feed_forward),
        ):
            out = self.stock(*args, **kwargs)

        def see_block() -> None:
            if ffn_out is None:
                raise LookupError("feed_forward was not called")
            evidence.structure.add(self._norm(gate, block.ffn_norm2, modulation[3], x, ffn_out), out)

        self.conclude(see_block)
        return out


def _modulation(m: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[B, 1, 4 * D] -> scale and gate of attention, scale and gate of the feed-forward; gates behind tanh.

    tanh is ATen's own, over all four at once: one launch and no copy; the half that is not needed is cheap.
    """
    scale_msa, _, scale_mlp, _ = m.chunk(4, dim=-1)
    _, gate_msa, _, gate_mlp = torch.tanh(m).chunk(4, dim=-1)
    return scale_msa, gate_msa, scale_mlp, gate_mlp


def _names_of(positional: tuple[Any, ...], named: dict[str, Any], arguments: dict[str, Any]) -> tuple[str, ...] | None:
    """The names of what was handed on by position; None if anything handed on is not one of `arguments` itself."""
    left = {name: value for name, value in arguments.items() if name not in named}
    if any(name not in arguments or arguments[name] is not value for name, value in named.items()):
        return None
    names = []
    for value in positional:
        name = next((name for name, candidate in left.items() if candidate is value), None)
        if name is None:
            return None
        del left[name]
        names.append(name)
    # What is left the host does not hand on: then neither may we, unless it is nothing.
    return None if any(value is not None for value in left.values()) else tuple(names)
