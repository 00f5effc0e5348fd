"""Exchanges the forwards of modules for the length of a context."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

_MISSING = object()

# Two threads that exchange forwards of one model at once would put back each other's.
EXCHANGE = threading.RLock()


@contextlib.contextmanager
def exchanged_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Lets each module run the given forward inside the context.

    They are put back in `finally`, as they were: ComfyUI's interrupt is a BaseException.
    """
    with EXCHANGE:
        before = [(module, module.__dict__.get("forward", _MISSING)) for module in forwards]
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
    try:
        yield
    finally:
        with EXCHANGE:
            for module, forward in before:
                if forward is _MISSING:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = forward


def is_patched(module: nn.Module, method: str = "forward") -> bool:
    """Whether something replaced this one module's forward, or another method of it.

    ComfyUI leaves a bound copy of the class's own method behind when it takes an object patch off; that is no patch.
    """
    found = module.__dict__.get(method)
    return found is not None and getattr(found, "__func__", None) is not getattr(type(module), method, None)


def is_hooked(module: nn.Module) -> bool:
    """Whether something watches this one module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_meddled_with(module: nn.Module) -> bool:
    """Whether something patched or watches this one module, so that its forward may not be skipped or repeated."""
    return is_hooked(module) or is_patched(module)
