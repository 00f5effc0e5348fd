"""Lossless under a random life: parts exchanged and put back, patches, hooks, interrupts, memory that runs out, kernels
that are wrong for several images, one to three forwards in a call. Every picture must be stock's, byte for byte."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from ideogram4_fusion.fusion.fusion import Fusion
from ideogram4_fusion.fusion.site import Site
from ideogram4_fusion.tests.fusing import Gelu, Kernel, eager_everywhere, make_fusion
from ideogram4_fusion.tests.stack import DEVICE, HIDDEN, Stack, make_inputs, make_stack
from torch import nn

LIVES, EVENTS = 40, 12


class _Interrupt(BaseException):
    """As core's interrupts, no Exception."""


class _Life:
    """A stack, a Fusion whose kernels fail as chance has it, and what may happen to them."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.stack: Stack = make_stack(2, seed=seed % 5)
        self.fusion: Fusion = make_fusion({name: self._kernel(eager) for name, eager in eager_everywhere().items()})
        with torch.inference_mode():
            self.stack(*make_inputs())  # on an H200 a process need not repeat its very first forward
        self.failing = 0.0  # share of the kernels' calls that find no memory
        self.exchanged: dict[tuple[int, str], nn.Module] = {}

    def _kernel(self, eager: Kernel) -> Kernel:
        wrong = self.random.random() < 0.25

        def kernel(*args: Any) -> Any:
            if self.random.random() < self.failing:
                raise torch.OutOfMemoryError
            out = eager(*args)
            if not wrong or args[0].shape[0] == 1:
                return out
            return tuple(part + 1 for part in out) if isinstance(out, tuple) else out + 1

        return kernel

    def _any(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def inputs(self) -> list[tuple[Any, ...]]:
        """Of one to three forwards."""
        return [
            make_inputs(self._any(1, 2, 3), self._any(3, 7, 11), self.random.randrange(9))
            for _ in range(self._any(1, 1, 2, 3))
        ]

    def memory(self) -> None:
        self.failing = self._any(0.0, 0.0, 0.05, 0.3)

    def exchange(self) -> None:
        number, part = self.random.randrange(2), self._any("ffn_norm1", "attention_norm2", "feed_forward")
        if (number, part) in self.exchanged:
            setattr(self.stack.layers[number], part, self.exchanged.pop((number, part)))
            return
        own = self.exchanged[number, part] = getattr(self.stack.layers[number], part)
        others = nn.Sequential(own), nn.RMSNorm(HIDDEN, eps=1e-2).to(DEVICE, torch.bfloat16)
        setattr(self.stack.layers[number], part, Gelu(own) if part == "feed_forward" else self._any(*others))

    def patch(self) -> None:
        ffn = self._any(*self.stack.layers).feed_forward
        if ffn.__dict__.pop("forward", None) is None:
            own = type(ffn).forward
            ffn.__dict__["forward"] = lambda x: 2 * own(ffn, x)

    def hook(self) -> None:
        norm = self._any(*self.stack.layers).ffn_norm1
        hook = norm.register_forward_hook(lambda module, args, out: 2 * out)
        self.compare()
        hook.remove()

    def interrupt(self) -> None:
        def stop(*args: object) -> None:
            raise _Interrupt

        block = self._any(*self.stack.layers)
        hook = self._any(block.attention, block.feed_forward, block.feed_forward.w2).register_forward_pre_hook(stop)
        with contextlib.suppress(_Interrupt):
            self.render(self.inputs())
        hook.remove()

    def retry(self) -> None:
        """A forward fails inside a call, which goes on with another."""
        failures = [RuntimeError("stock itself")]

        def fail(*args: object) -> None:
            if failures:
                raise failures.pop()

        block, (first, *_), (second, *_) = self._any(*self.stack.layers), self.inputs(), self.inputs()
        hook = self._any(block.attention, block.feed_forward).register_forward_pre_hook(fail)
        with torch.inference_mode(), self.fusion.mounted(self.stack):
            with contextlib.suppress(RuntimeError):
                self.stack(*first)
            self.stack(*second)
        hook.remove()

    def reclass(self) -> None:
        block = self._any(*self.stack.layers)
        module = self._any(block.feed_forward, block.attention_norm1)
        own = type(module)
        if own.__name__ == "_Doubling":
            module.__class__ = own.__bases__[0]
        else:
            module.__class__ = type("_Doubling", (own,), {"forward": lambda self, x: 2 * own.forward(self, x)})

    def render(self, inputs: list[tuple[Any, ...]]) -> list[torch.Tensor]:
        with torch.inference_mode():
            return self.fusion.run(self.stack, lambda: [self.stack(*each) for each in inputs])

    def compare(self) -> None:
        inputs = self.inputs()
        with torch.inference_mode():
            stock = [self.stack(*each) for each in inputs]
        fused = self.render(inputs)
        assert all(map(torch.equal, fused, stock)), self.fusion.status(self.stack)
        assert not any(isinstance(module.__dict__.get("forward"), Site) for module in self.stack.modules())


@pytest.mark.parametrize("seed", range(LIVES))
def test_every_picture_of_a_random_life_is_stocks(seed: int) -> None:
    life = _Life(seed)
    for _ in range(EVENTS):
        events: list[Callable[[], None]] = [life.memory, life.exchange, life.exchange, life.patch, life.hook]
        life.random.choice([*events, life.interrupt, life.retry, life.reclass])()
        life.compare()
