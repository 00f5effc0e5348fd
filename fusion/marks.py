"""What a proof on a model's blocks rests on besides their inputs, and whether it still stands."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn

from .structure import NORMS

_FORWARD = operator.methodcaller("get", "forward")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Marks:
    """The modules that blocks consist of, their classes' forwards, whatever was put on them by name, the hooks and
    forwards of the layers inside, and the norms' dtypes, as they are when this is made.

    Objects are held and compared by identity, so that no address is used again. It is looked at before every forward,
    hence the loops in C.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        holders: list[Any] = [part for b in blocks for part in (b, b.attention, b.feed_forward)]
        layers = [layer for holder in holders for layer in holder._modules.values() if layer is not None]
        self._classes = list({type(module) for module in (*holders, *layers)})
        self._dicts = [d for m in holders for d in (m.__dict__, m._modules)]
        self._hooks: list[Any] = [getattr(layer, hooks) for layer in layers for hooks in _HOOKS]
        self._layers = [layer.__dict__ for layer in layers]
        self._norms = [b._modules[name] for b in blocks for name in NORMS]
        self._then = self._now()

    def hold(self) -> bool:
        """Whether nothing was exchanged since."""
        now = self._now()
        return len(now) == len(self._then) and all(map(operator.is_, now, self._then))

    def _now(self) -> list[object]:
        found: list[object] = [cls.forward for cls in self._classes]
        found += chain.from_iterable(map(dict.values, self._dicts))
        found += chain.from_iterable(map(dict.values, filter(None, self._hooks)))
        found += map(_FORWARD, self._layers)
        found += [getattr(norm._parameters.get("weight"), "dtype", None) for norm in self._norms]
        return found
