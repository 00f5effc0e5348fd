"""A place where a module's forward is exchanged.

A site stands in for one module's `forward`. The first time it sees a signature it runs the host's forward untouched,
looks at the tensors that pass between the module's own parts, and computes the chains beside it (the shadow). Once a
forward has shown them equal, later calls with that signature take the kernels.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..kernels.memory import is_out_of_memory
from .emission import Emitted
from .exchange import exchanged_forwards
from .proof import as_integers

if TYPE_CHECKING:
    from .mount import Mount


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hidden states of a call, given by position or by whatever name."""
    return args[0] if args else next(iter(kwargs.values()))


Watch = Callable[[tuple[Any, ...], dict[str, Any], torch.Tensor], None]


class Site:
    """Stands in for `module.forward` while mounted. Subclasses say what is fused and how it is proven."""

    def __init__(self, module: nn.Module, mount: Mount) -> None:
        self.module = module
        # Weakly, since the mount holds its sites: a cycle would keep a model's weights until the collector comes by.
        self._mount = weakref.ref(mount)
        self.proven: set[Hashable] = set()

    @property
    def mount(self) -> Mount:
        """Whose site it is; alive as long as it is active."""
        mount = self._mount()
        assert mount is not None
        return mount

    def stock(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The module's own forward, as its class has it now."""
        out: torch.Tensor = type(self.module).forward(self.module, *args, **kwargs)
        return out

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = first_argument(args, kwargs)
        if isinstance(x, Emitted):
            # Its block's signature covers this form, and its block's shadow proved it.
            return self.fused(self.bind(args, kwargs))
        # Under torch.compile the host's own chain is traced: Inductor fuses it its own way, and no proof can run there.
        if torch.compiler.is_compiling() or (mount := self._mount()) is None or not mount.serves():
            return self.stock(*args, **kwargs)
        plain = self._plain(x)
        mount.begin(self, x.numel() if plain else 0)
        if not plain or self.obstructed(args, kwargs):
            return self.stock(*args, **kwargs)
        call = self.bind(args, kwargs)
        signature = self.signature(call)
        if signature in self.proven:
            return self.fused(call)
        if not mount.may_compare() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self.stock(*args, **kwargs)  # a captured forward proves nothing: it has not run yet
        before = as_integers(x).sum()  # what is written into it changes that, but for chance
        try:
            with mount.fp8.comparing():
                out = self.shadow(call, args, kwargs)
        except Exception as error:
            if not is_out_of_memory(error) or not torch.equal(as_integers(x).sum(), before):
                raise  # stock that writes into what it is given cannot begin anew
            mount.stop_comparing()  # the comparison holds tensors that stock would have let go of
        else:
            # Behind it: one that failed inside a call which then comes to its end has shown nothing.
            mount.evidence.witnesses.append((self.proven, signature))
            return out
        return self.stock(*args, **kwargs)

    def _plain(self, x: Any) -> bool:
        """Whether `x` is what the proof and the kernels are about: no gradients, no autocast, at least one value."""
        if not isinstance(x, torch.Tensor) or x.ndim != 3 or x.numel() == 0:
            return False
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.module.parameters())):
            return False  # the kernels have no backward
        return not torch.is_autocast_enabled(x.device.type)

    @contextlib.contextmanager
    def watched(self, module: nn.Module, watch: Watch) -> Iterator[None]:
        """Calls `watch(arguments, named arguments, output)` behind every forward of `module`, which runs as ever."""
        stock = module.forward

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            out: torch.Tensor = stock(*args, **kwargs)
            self.conclude(lambda: watch(args, kwargs, out))
            return out

        with exchanged_forwards({module: forward}):
            yield

    def conclude(self, look: Callable[[], None]) -> None:
        """Looks at what stock did. Where that cannot be followed the model is not what it seems, and runs stock."""
        if not self.mount.serves():
            return
        try:
            look()
        except Exception as error:
            if is_out_of_memory(error):
                self.mount.stop_comparing()
                return
            name = type(self.module).__name__
            self.mount.run_stock(f"{name} does not use its parts as Ideogram 4 does ({type(error).__name__})")

    def obstructed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether something stands in the way of fusing a call with these arguments."""
        return False

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def signature(self, call: Any) -> Hashable:
        """Everything but the number of tokens that the proof depends on; versions cannot change in a process."""
        raise NotImplementedError

    def fused(self, call: Any) -> torch.Tensor:
        raise NotImplementedError

    def shadow(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError


def form_of(x: torch.Tensor) -> Hashable:
    """Device, dtype, last size, broadcast class and strides of a tensor; free in the number of tokens and of images."""
    return x.shape[-1], kind_of(x)


def kind_of(value: Any) -> Hashable:
    """The form without the last size, which for a mask is the number of tokens; None for what is no tensor.

    A tensor with gaps keeps its exact shape and strides, and is proven anew for every shape.
    """
    if isinstance(value, tuple):
        return tuple(kind_of(part) for part in value)
    if not isinstance(value, torch.Tensor):
        return None
    strides = None if value.is_contiguous() else (value.shape, value.stride())
    return value.device, value.dtype, tuple(size == 1 for size in value.shape[:-1]), strides
