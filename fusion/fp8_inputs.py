"""Which Linears of a model are given fp8, and hidden states on their way to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .chains import FP8_INPUT, ROWS_INPUT
from .emission import BF16, BY_ROWS, PLAIN, Emission, Emitted, Form
from .pieces import Pieces
from .proof import Ledger, raised


class Fp8Inputs:
    """What holds for one forward is worked out where it is first asked for, and forgotten with it.

    Args:
        emission: of the host, where it has one.
        run: name of a chain -> the chain in the form in which it runs now.
        ledger: of the Fusion.
        pieces: of `high`.

    Attributes:
        by_rows: whether any Linear was ever given rows with scales of their own.
    """

    def __init__(
        self, emission: Emission | None, run: Callable[[str], Callable[..., Any]], ledger: Ledger, pieces: Pieces
    ) -> None:
        self._emission, self._run, self._ledger, self._pieces = emission, run, ledger, pieces
        self.by_rows = False
        self._comparing = 0
        self._units: dict[torch.device, torch.Tensor] = {}
        self._forms: dict[int, Form] = {}
        self._shared: dict[int, tuple[torch.Tensor, Emitted]] = {}

    def begin(self) -> None:
        """A forward begins; a call may run several."""
        self._forms.clear()
        self._shared.clear()

    def end(self) -> None:
        """The call is over."""
        self.begin()
        self._units.clear()

    def form(self, linear: nn.Module | None) -> Form:
        """What a Linear is to be given."""
        if linear is None or self._emission is None:
            return BF16
        form = self._forms.get(id(linear))
        if form is None:
            form = self._forms[id(linear)] = self._work_out(linear, self._emission)
        return form if (ROWS_INPUT if form == BY_ROWS else FP8_INPUT) not in self._ledger.refused else BF16

    def _work_out(self, linear: nn.Module, emission: Emission) -> Form:
        try:
            if emission.takes(linear):
                return PLAIN
        except Exception as error:  # a host that has changed
            self._ledger.refuse(FP8_INPUT, raised(error))
        if not self._pieces.row_wise_fp8:
            return BF16
        try:
            takes = emission.takes_rows(linear)
        except Exception as error:
            self._ledger.refuse(ROWS_INPUT, raised(error))
            return BF16
        self.by_rows |= takes
        return BY_ROWS if takes else BF16

    def emitted(self, data: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Emitted:
        """Hidden states [..., K] that a kernel wrote in fp8, contiguous, and the scales [...] where it wrote some."""
        assert self._emission is not None  # written only where a Linear takes it
        if isinstance(data, tuple):
            rows, scale = data
            scale = scale.view(-1, 1)
        else:
            rows, scale = data, self._unit(data.device)
        return Emitted(rows.view(-1, rows.shape[-1]), rows.shape[:-1], self._emission, scale, self._fast())

    def _fast(self) -> bool:
        return self._pieces.fast_accumulation and not self._comparing

    def _unit(self, device: torch.device) -> torch.Tensor:
        unit = self._units.get(device)
        if unit is None:
            unit = self._units[device] = torch.ones((), dtype=torch.float32, device=device)
        return unit

    def spare(self, linear: nn.Module, x: torch.Tensor) -> torch.Tensor | Emitted:
        """bf16 hidden states [..., K] in the form that a Linear is to be given; as they are where that is bf16."""
        form = self.form(linear)
        if form == BF16 or not x.is_contiguous():
            return x
        rows = x.view(-1, x.shape[-1])
        if form == BY_ROWS:
            quantised, scales = self._run(ROWS_INPUT)(rows)
            return self.emitted((quantised.view(x.shape), scales))
        return self.emitted(self._run(FP8_INPUT)(rows).view(x.shape))

    def spare_shared(self, linear: nn.Module, x: torch.Tensor) -> torch.Tensor | Emitted:
        """`spare` for a tensor that every block of a forward is given: it is quantised once.

        Only where stock quantises it too; a single token is multiplied in bf16 as fast.
        """
        if self.form(linear) != PLAIN:
            return x
        known = self._shared.get(id(x))
        if known is not None and known[0] is x:
            return known[1]._replace(fast=self._fast())
        emitted = self.spare(linear, x)
        if isinstance(emitted, Emitted):
            self._shared[id(x)] = x, emitted
        return emitted

    @contextlib.contextmanager
    def comparing(self) -> Iterator[None]:
        """While something is compared with stock, products are stock's own."""
        self._comparing += 1
        try:
            yield
        finally:
            self._comparing -= 1
