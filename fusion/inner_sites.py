"""The two modules inside a block whose forward is exchanged: its feed-forward and its attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from ..kernels.memory import is_out_of_memory
from .chains import ROPE, SILU_MUL
from .emission import BF16, BY_ROWS, PLAIN, Emitted, Form, run_linear
from .host import Spare
from .proof import differing
from .site import Site, Watch, first_argument, form_of, kind_of


class FeedForwardSite(Site):
    """The feed-forward w2(silu(w1 x) * w3 x)."""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | Emitted:
        x: torch.Tensor | Emitted = first_argument(args, kwargs)
        return x

    def signature(self, call: torch.Tensor) -> Hashable:
        return form_of(call), self._emits()

    def _emits(self) -> Form:
        return BF16 if SILU_MUL in self.mount.ledger.refused else self.mount.fp8.form(self.module._modules["w2"])

    def fused(self, call: torch.Tensor | Emitted) -> torch.Tensor:
        ffn: Any = self.module
        form = self._emits()
        # Nothing holds what w1 and w3 give: 107 MB each at 1024 x 1024, gone before w2 where stock lets go of them too.
        product = self.mount.run(SILU_MUL)(run_linear(ffn.w1, call), run_linear(ffn.w3, call), *form)
        return run_linear(ffn.w2, product if form == BF16 else self.mount.fp8.emitted(product))

    def shadow(self, call: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        ffn: Any = self.module
        evidence = self.mount.evidence
        silu_mul = self.mount.compare(SILU_MUL)
        first: dict[str, torch.Tensor] = {}  # of w1 and w3
        expected: torch.Tensor | None = None  # what w2 is to be given
        result: torch.Tensor | None = None
        emits = self._emits()

        def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
            if ours is not theirs:
                evidence.structure.add(ours, theirs)

        def see_first(name: str) -> Watch:
            def see(given: tuple[Any, ...], named: dict[str, Any], out: torch.Tensor) -> None:
                nonlocal expected
                same(call, first_argument(given, named))
                if name in first or expected is not None:
                    raise LookupError(f"{name} was called twice")
                first[name] = out
                if len(first) == 2:
                    # Here, and not behind w2, so that nothing is kept of w1 and w3 that stock has let go of.
                    a, b = first.pop("w1"), first.pop("w3")
                    expected = silu_mul(a, b)
                    if emits == BY_ROWS:
                        silu_mul(a, b, *BY_ROWS)
                    elif emits == PLAIN:
                        self.mount.compare_emission(SILU_MUL, expected)(a, b)

            return see

        def see_w2(given: tuple[Any, ...], named: dict[str, Any], out: torch.Tensor) -> None:
            nonlocal result
            if expected is None or result is not None:
                raise LookupError("w2 was called otherwise")
            evidence.structure.add(expected, first_argument(given, named))
            result = out

        w1, w3 = self.watched(ffn.w1, see_first("w1")), self.watched(ffn.w3, see_first("w3"))
        with w1, w3, self.watched(ffn.w2, see_w2):
            out = self.stock(*args, **kwargs)
        expected = None

        def see_whole() -> None:
            if result is None:
                raise LookupError("w2 was not called")
            same(result, out)
            forms = {emits, self.mount.fp8.form(ffn.w1), self.mount.fp8.form(ffn.w3)}
            if PLAIN in forms and BY_ROWS not in forms:
                spared = self._spared(call)
                self.mount.compare_spared(lambda: self.fused(spared), out)

        self.conclude(see_whole)
        return out

    def _spared(self, x: torch.Tensor) -> torch.Tensor | Emitted:
        fp8, ffn = self.mount.fp8, self.module
        return fp8.spare(ffn.w1, x) if fp8.form(ffn.w3) == fp8.form(ffn.w1) else x


class AttentionSite(Site):
    """Attention as its host writes it out, with the rope exchanged."""

    def obstructed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return not args or not self.mount.takes_attention(self.module, kwargs)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def signature(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Hashable:
        (x, *rest), kwargs = call
        kinds = kind_of(tuple(rest)), tuple((name, kind_of(value)) for name, value in kwargs.items())
        return form_of(x), kinds, *map(self.mount.fp8.form, self.mount.attention_linears(self.module))

    def fused(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> torch.Tensor:
        return self._with_rope(self.mount.run(ROPE), self.mount.fp8.spare, *call)

    def shadow(
        self, call: tuple[tuple[Any, ...], dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        out = self.stock(*args, **kwargs)
        try:
            self._compare_form(out, args, kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                self.mount.stop_comparing()
            else:
                self.mount.ledger.refuse(ROPE, f"attention cannot be written out ({type(error).__name__})")
        return out

    def _compare_form(self, out: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ours = self._with_rope(self.mount.compare(ROPE), _unspared, args, kwargs)
        # The first call of a process may differ from the next: on an H200 attention or its projection did. So stock is
        # asked once more before it is said to compute something else.
        stock = self.stock(*args, **kwargs) if differing(ours, out) else out
        self.mount.evidence.form(ROPE).add(ours, stock)
        (first, last), x = self.mount.attention_linears(self.module), args[0]
        fp8 = self.mount.fp8
        forms = {fp8.form(first), fp8.form(last)}
        if PLAIN in forms and BY_ROWS not in forms:
            given = x if first is None else fp8.spare(first, x)
            spared = given, *args[1:]
            rope = self.mount.run(ROPE)
            self.mount.compare_spared(lambda: self._with_rope(rope, fp8.spare, spared, kwargs), stock)

    def _with_rope(
        self, rope: Callable[..., Any], spare: Spare, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        form = self.mount.host.attention
        assert form is not None  # an AttentionSite is only made for hosts that have one
        return form.forward(self.module, rope, spare, *args, **kwargs)


def _unspared(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x
