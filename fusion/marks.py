"""What a proof on a model's blocks rests on besides their inputs, and whether it still stands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Marks:
    """The modules that blocks consist of, their classes, the forwards of these, whatever was put on the modules by
    name, their hooks, the hooks and forwards of the layers inside, as they are when this is made.

    Objects are held and compared by identity, so that no address is used again. It is looked at before every forward,
    hence the loops in C.

    Args:
        blocks: of the model.
        host: more that a proof rests on, as the host has it now.
    """

    def __init__(self, blocks: Sequence[nn.Module], host: Callable[[], Iterable[object]]) -> None:
        holders: list[Any] = [part for b in blocks for part in (b, b.attention, b.feed_forward)]
        layers = [layer for holder in holders for layer in holder._modules.values() if layer is not None]
        self._classes = list({type(module) for module in (*holders, *layers)})
        self._dicts = [d for m in holders for d in (m.__dict__, m._modules)]
        self._layers = [layer.__dict__ for layer in layers]
        self._modules = list({id(m): m for m in (*holders, *layers)}.values())
        self._hooked = [module.__dict__ for module in self._modules]
        self._host = host
        self._then = self._now()

    def hold(self) -> bool:
        """Whether nothing was exchanged since."""
        now = self._now()
        return len(now) == len(self._then) and all(map(operator.is_, now, self._then))

    def _now(self) -> list[object]:
        found: list[object] = [*self._host(), *(cls.forward for cls in self._classes), *map(type, self._modules)]
        found += chain.from_iterable(map(dict.values, self._dicts))
        for hooks in _HOOKS:
            found += chain.from_iterable(map(dict.values, filter(None, map(dict.get, self._hooked, repeat(hooks)))))
        found += map(dict.get, self._layers, repeat("forward"))
        return found
