"""The two modules inside a block whose forward is exchanged: its feed-forward and its attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from .chains import FP8_INPUT, ROPE, SILU_MUL
from .emission import FP8, Emitted, run_linear
from .proof import differing
from .site import Site, first_argument, form_of, watched


class FeedForwardSite(Site):
    """The feed-forward w2(silu(w1 x) * w3 x)."""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | Emitted:
        x: torch.Tensor | Emitted = first_argument(args, kwargs)
        return x

    def hidden_states(self, call: torch.Tensor | Emitted) -> torch.Tensor | Emitted:
        return call

    def signature(self, call: torch.Tensor) -> Hashable:
        return form_of(call), self.mount.takes_fp8(self.module.w2)

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

        def see_w1(_: Any, __: Any, out: torch.Tensor) -> None:
            hidden["w1"] = out

        def see_w3(_: Any, __: Any, out: torch.Tensor) -> None:
            hidden["w3"] = out

        def see_w2(given: tuple[Any, ...], named: dict[str, Any], _: torch.Tensor) -> None:
            seen = first_argument(given, named)
            a, b = hidden.pop("w1"), hidden.pop("w3")
            evidence.structure.add(silu_mul(a, b), seen)
            if emits:
                self.mount.compare_emission(SILU_MUL, seen)(a, b)

        with watched(ffn.w1, see_w1), watched(ffn.w3, see_w3), watched(ffn.w2, see_w2):
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
        return form_of(first_argument(*call)), self.mount.takes_fp8(getattr(self.module, "qkv", None))

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
