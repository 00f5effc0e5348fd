"""A place where a module's forward is exchanged.

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

from .emission import Emitted
from .exchange import exchanged_forwards

if TYPE_CHECKING:
    from .mount import Mount


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hidden states of a call, given by position or by whatever name."""
    return args[0] if args else next(iter(kwargs.values()))


Watch = Callable[[tuple[Any, ...], dict[str, Any], torch.Tensor], None]


@contextlib.contextmanager
def watched(module: nn.Module, watch: Watch) -> Iterator[None]:
    """Calls `watch(arguments, named arguments, output)` behind every forward of `module`, which runs as ever."""
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = stock(*args, **kwargs)
        watch(args, kwargs, out)
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


def form_of(x: torch.Tensor) -> Hashable:
    """Device, dtype, last size, broadcast class and strides of a tensor; free in the number of tokens and of images.

    A tensor with gaps keeps its exact strides, and is proven anew for every shape.
    """
    strides = None if x.is_contiguous() else (x.shape, x.stride())
    return x.device, x.dtype, x.ndim, x.shape[-1], x.shape[0] == 1, x.shape[1] == 1, strides
