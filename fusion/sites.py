"""The three places of a block where a forward is exchanged: the block, its feed-forward, its attention.

A site stands in for one module's `forward`. The first time it sees a signature it runs the host's forward untouched,
looks at the tensors that pass between the module's own parts, and computes the chains beside it (the shadow). Once a
forward has shown them equal, later calls with that signature take the kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .chains import GATE, MODULATE, ROPE, SILU_MUL
from .exchange import exchanged_forwards
from .proof import differing
from .structure import BlockCall, BlockSignature

if TYPE_CHECKING:
    from .mount import Mount


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states of a call, given by position or by whatever name."""
    first: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
    return first


@contextlib.contextmanager
def _watched(module: nn.Module, watch: Callable[[torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Calls `watch(first input, output)` behind every forward of `module`, which runs as ever."""
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = stock(*args, **kwargs)
        watch(first_argument(args, kwargs), out)
        return out

    with exchanged_forwards({module: forward}):
        yield


class Site:
    """Stands in for `module.forward` while mounted. Subclasses say what is fused and how it is proven."""

    def __init__(self, module: nn.Module, mount: Mount) -> None:
        self.module = module
        self.mount = mount
        self.stock: Callable[..., torch.Tensor] = type(module).forward.__get__(module)
        self.proven: set[Hashable] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Under torch.compile the host's own chain is traced: Inductor fuses it its own way, and no proof can run there.
        if torch.compiler.is_compiling() or self.mount.ledger.stock_reason is not None:
            return self.stock(*args, **kwargs)
        call = self.bind(args, kwargs)
        x = self.hidden_states(call)
        if x.requires_grad and torch.is_grad_enabled():
            return self.stock(*args, **kwargs)  # the kernels have no backward
        signature = self.signature(call)
        if signature in self.proven:
            return self.fused(call)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.stock(*args, **kwargs)  # a captured forward proves nothing: it has not run yet
        self.mount.evidence.witnesses.append((self.proven, signature))
        return self.shadow(call, args, kwargs)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def hidden_states(self, call: Any) -> torch.Tensor:
        raise NotImplementedError

    def signature(self, call: Any) -> Hashable:
        """Everything but the number of tokens that the proof depends on; versions cannot change in a process."""
        raise NotImplementedError

    def fused(self, call: Any) -> torch.Tensor:
        raise NotImplementedError

    def shadow(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError


def _form(x: torch.Tensor) -> Hashable:
    """Device, dtype, last size, broadcast class and strides of a tensor; free in the number of tokens and of images.

    A tensor with gaps keeps its exact strides, and is proven anew for every shape.
    """
    strides = None if x.is_contiguous() else (x.shape, x.stride())
    return x.device, x.dtype, x.ndim, x.shape[-1], x.shape[0] == 1, x.shape[1] == 1, strides


class BlockSite(Site):
    """The block: modulate in front of attention and feed-forward, gate behind them."""

    def __init__(self, module: nn.Module, mount: Mount, signature: BlockSignature) -> None:
        super().__init__(module, mount)
        self._signature = signature

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        return self._signature.bind(args, kwargs)

    def hidden_states(self, call: BlockCall) -> torch.Tensor:
        return call.x

    def signature(self, call: BlockCall) -> Hashable:
        return _form(call.x), _form(call.adaln_input)

    def _norm(
        self, chain: Callable[..., torch.Tensor], norm: nn.RMSNorm, m: torch.Tensor, *hidden: torch.Tensor
    ) -> torch.Tensor:
        with self.mount.host.norm_weight(norm, hidden[-1]) as weight:
            return chain(*hidden, weight, m, norm.eps)

    def fused(self, call: BlockCall) -> torch.Tensor:
        block: Any = self.module
        modulate, gate = self.mount.run(MODULATE), self.mount.run(GATE)
        scale_msa, gate_msa, scale_mlp, gate_mlp = block.adaln_modulation(call.adaln_input).chunk(4, dim=-1)
        h = self._norm(modulate, block.attention_norm1, scale_msa, call.x)
        h = block.attention(h, **call.attention)
        x = self._norm(gate, block.attention_norm2, gate_msa, call.x, h)
        h = self._norm(modulate, block.ffn_norm1, scale_mlp, x)
        h = block.feed_forward(h)
        return self._norm(gate, block.ffn_norm2, gate_mlp, x, h)

    def shadow(self, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        block: Any = self.module
        evidence = self.mount.evidence
        modulate, gate = self.mount.compare(MODULATE), self.mount.compare(GATE)
        modulation: list[torch.Tensor] = []
        x = call.x
        ffn_out: torch.Tensor | None = None

        def see_modulation(_: torch.Tensor, out: torch.Tensor) -> None:
            modulation.extend(out.chunk(4, dim=-1))

        def see_attention(seen: torch.Tensor, out: torch.Tensor) -> None:
            nonlocal x
            evidence.structure.add(self._norm(modulate, block.attention_norm1, modulation[0], x), seen)
            x = self._norm(gate, block.attention_norm2, modulation[1], x, out)

        def see_feed_forward(seen: torch.Tensor, out: torch.Tensor) -> None:
            nonlocal ffn_out
            evidence.structure.add(self._norm(modulate, block.ffn_norm1, modulation[2], x), seen)
            ffn_out = out

        with (
            _watched(block.adaln_modulation, see_modulation),
            _watched(block.attention, see_attention),
            _watched(block.feed_forward, see_feed_forward),
        ):
            out = self.stock(*args, **kwargs)
        if ffn_out is None:
            self.mount.ledger.stock_reason = f"{type(block).__name__} did not call its feed_forward"
        else:
            evidence.structure.add(self._norm(gate, block.ffn_norm2, modulation[3], x, ffn_out), out)
        return out


class FeedForwardSite(Site):
    """The feed-forward w2(silu(w1 x) * w3 x)."""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        return first_argument(args, kwargs)

    def hidden_states(self, call: torch.Tensor) -> torch.Tensor:
        return call

    def signature(self, call: torch.Tensor) -> Hashable:
        return _form(call)

    def fused(self, call: torch.Tensor) -> torch.Tensor:
        ffn: Any = self.module
        out: torch.Tensor = ffn.w2(self.mount.run(SILU_MUL)(ffn.w1(call), ffn.w3(call)))
        return out

    def shadow(self, call: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        ffn: Any = self.module
        evidence = self.mount.evidence
        silu_mul = self.mount.compare(SILU_MUL)
        hidden: dict[str, torch.Tensor] = {}

        def see_w1(_: torch.Tensor, out: torch.Tensor) -> None:
            hidden["w1"] = out

        def see_w3(_: torch.Tensor, out: torch.Tensor) -> None:
            hidden["w3"] = out

        def see_w2(seen: torch.Tensor, _: torch.Tensor) -> None:
            evidence.structure.add(silu_mul(hidden.pop("w1"), hidden.pop("w3")), seen)

        with _watched(ffn.w1, see_w1), _watched(ffn.w3, see_w3), _watched(ffn.w2, see_w2):
            return self.stock(*args, **kwargs)


class AttentionSite(Site):
    """Attention of a host whose rope is the rotate-half chain: written out by the host, with its rope left open."""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def hidden_states(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> torch.Tensor:
        return first_argument(*call)

    def signature(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Hashable:
        return _form(self.hidden_states(call))

    def fused(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> torch.Tensor:
        return self._with_rope(self.mount.run(ROPE), *call)

    def shadow(
        self, call: tuple[tuple[Any, ...], dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        out = self.stock(*args, **kwargs)
        ours = self._with_rope(self.mount.compare(ROPE), args, kwargs)
        # The first call of a process may differ from the next: on an H200 attention or its projection did. So stock is
        # asked once more before it is said to compute something else.
        stock = self.stock(*args, **kwargs) if differing(ours, out) else out
        self.mount.evidence.structure.add(ours, stock)
        return out

    def _with_rope(
        self, rope: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        forward = self.mount.host.attention_forward
        assert forward is not None  # an AttentionSite is only made for hosts that give one
        return forward(self.module, rope, *args, **kwargs)
