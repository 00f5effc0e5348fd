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

from .chains import FP8_INPUT, GATE, MERGE, MODULATE, ROPE, SILU_MUL
from .emission import FP8, Emitted, run_linear
from .exchange import exchanged_forwards
from .proof import differing
from .structure import BlockCall, BlockSignature

if TYPE_CHECKING:
    from .mount import Mount


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hidden states of a call, given by position or by whatever name."""
    return args[0] if args else next(iter(kwargs.values()))


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
        if isinstance(x, Emitted):
            return self.fused(call)  # its block proved this form together with the plain one
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

    def hidden_states(self, call: Any) -> torch.Tensor | Emitted:
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
        return _form(call.x), _form(call.adaln_input), self.mount.emits(self.module, call.attention)

    def _norm(self, chain: Callable[..., Any], norm: nn.RMSNorm, m: torch.Tensor, *hidden: Any, **more: Any) -> Any:
        with self.mount.host.norm_weight(norm, hidden[-1]) as weight:
            return chain(*hidden, weight, m, norm.eps, **more)

    def fused(self, call: BlockCall) -> torch.Tensor:
        block: Any = self.module
        to_attention, to_feed_forward = self.mount.emits(block, call.attention)
        modulate, gate = self.mount.run(MODULATE), self.mount.run(GATE)
        scale_msa, gate_msa, scale_mlp, gate_mlp = block.adaln_modulation(call.adaln_input).chunk(4, dim=-1)
        if to_attention:
            h = self.mount.emitted(self._norm(modulate, block.attention_norm1, scale_msa, call.x, out_dtype=FP8))
        else:
            h = self._norm(modulate, block.attention_norm1, scale_msa, call.x)
        h = block.attention(h, **call.attention)
        x, h = self._gate_modulate(call.x, h, gate_msa, scale_mlp, FP8 if to_feed_forward else torch.bfloat16)
        h = block.feed_forward(self.mount.emitted(h) if to_feed_forward else h)
        gated: torch.Tensor = self._norm(gate, block.ffn_norm2, gate_mlp, x, h)
        return gated

    def _gate_modulate(
        self, x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gate behind attention and the modulated norm behind it: one kernel, or two where that one is refused."""
        block: Any = self.module
        refused = self.mount.ledger.refused
        if MERGE in refused or MODULATE in refused or GATE in refused:
            x = self._norm(self.mount.run(GATE), block.attention_norm2, gate, x, branch)
            return x, self._norm(self.mount.run(MODULATE), block.ffn_norm1, scale, x, out_dtype=out_dtype)
        weight_of = self.mount.host.norm_weight
        after, before = block.attention_norm2, block.ffn_norm1
        with weight_of(after, branch) as weight, weight_of(before, branch) as following:
            both: tuple[torch.Tensor, torch.Tensor] = self.mount.run(MERGE)(
                x, branch, weight, gate, following, scale, after.eps, before.eps, out_dtype
            )
        return both

    def shadow(self, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        block: Any = self.module
        evidence = self.mount.evidence
        to_attention, to_feed_forward = self.mount.emits(block, call.attention)
        modulate, gate, merge = (self.mount.compare(name) for name in (MODULATE, GATE, MERGE))
        modulation: list[torch.Tensor] = []
        x = call.x
        ffn_out: torch.Tensor | None = None

        def see_modulation(_: torch.Tensor, out: torch.Tensor) -> None:
            modulation.extend(out.chunk(4, dim=-1))

        def see_attention(seen: torch.Tensor, out: torch.Tensor) -> None:
            nonlocal x
            evidence.structure.add(self._norm(modulate, block.attention_norm1, modulation[0], x), seen)
            if to_attention:
                emit = self.mount.compare_emission(MODULATE, seen)
                self._norm(emit, block.attention_norm1, modulation[0], x)
            weight_of = self.mount.host.norm_weight
            after, before = block.attention_norm2, block.ffn_norm1
            with weight_of(after, out) as weight, weight_of(before, out) as following:
                merge(x, out, weight, modulation[1], following, modulation[2], after.eps, before.eps)
            x = self._norm(gate, after, modulation[1], x, out)

        def see_feed_forward(seen: torch.Tensor, out: torch.Tensor) -> None:
            nonlocal ffn_out
            evidence.structure.add(self._norm(modulate, block.ffn_norm1, modulation[2], x), seen)
            if to_feed_forward:
                emit = self.mount.compare_emission(MODULATE, seen)
                self._norm(emit, block.ffn_norm1, modulation[2], x)
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

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | Emitted:
        x: torch.Tensor | Emitted = first_argument(args, kwargs)
        return x

    def hidden_states(self, call: torch.Tensor | Emitted) -> torch.Tensor | Emitted:
        return call

    def signature(self, call: torch.Tensor) -> Hashable:
        return _form(call), self.mount.takes_fp8(self.module.w2)

    def fused(self, call: torch.Tensor | Emitted) -> torch.Tensor:
        ffn: Any = self.module
        a, b = run_linear(ffn.w1, call), run_linear(ffn.w3, call)
        silu_mul = self.mount.run(SILU_MUL)
        if self.mount.takes_fp8(ffn.w2):
            return run_linear(ffn.w2, self.mount.emitted(silu_mul(a, b, FP8)))
        return run_linear(ffn.w2, silu_mul(a, b))

    def shadow(self, call: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        ffn: Any = self.module
        evidence = self.mount.evidence
        silu_mul = self.mount.compare(SILU_MUL)
        hidden: dict[str, torch.Tensor] = {}
        emits = self.mount.takes_fp8(ffn.w2)

        def see_w1(_: torch.Tensor, out: torch.Tensor) -> None:
            hidden["w1"] = out

        def see_w3(_: torch.Tensor, out: torch.Tensor) -> None:
            hidden["w3"] = out

        def see_w2(seen: torch.Tensor, _: torch.Tensor) -> None:
            a, b = hidden.pop("w1"), hidden.pop("w3")
            evidence.structure.add(silu_mul(a, b), seen)
            if emits:
                self.mount.compare_emission(SILU_MUL, seen)(a, b)

        with _watched(ffn.w1, see_w1), _watched(ffn.w3, see_w3), _watched(ffn.w2, see_w2):
            return self.stock(*args, **kwargs)


class AttentionSite(Site):
    """Attention as its host writes it out, with the rope exchanged."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(first_argument(args, kwargs), Emitted) or self.mount.takes_attention(self.module, kwargs):
            return super().__call__(*args, **kwargs)
        return self.stock(*args, **kwargs)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def hidden_states(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> torch.Tensor | Emitted:
        x: torch.Tensor | Emitted = first_argument(*call)
        return x

    def signature(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Hashable:
        return _form(first_argument(*call)), self.mount.takes_fp8(getattr(self.module, "qkv", None))

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
        if args and self.mount.takes_fp8(getattr(self.module, "qkv", None)):
            emitted = self.mount.quantised(args[0])
            spared = self._with_rope(self.mount.run(ROPE), (emitted, *args[1:]), kwargs)
            self.mount.evidence.count(FP8_INPUT).add(spared, stock)
        return out

    def _with_rope(
        self, rope: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        form = self.mount.host.attention
        assert form is not None  # an AttentionSite is only made for hosts that have one
        return form.forward(self.module, rope, *args, **kwargs)
