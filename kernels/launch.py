"""Launches with little Python: what depends on the form of the arguments alone is worked out once for each form.

A block launches six kernels. Checking the arguments, computing grid and strides, and Triton's own search for the
compiled kernel took 60 us a launch on the host of an H200; a search by form and a launch of what it finds take 25.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton

# Triton's own tutorials launch a compiled kernel as `compiled[grid](*arguments)`. Read in its sources: these versions
# take every argument of the kernel there, constants included, and do not look at them again.
_DIRECT = (3, 5) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)

# A form is an image size at a batch size; a server that has seen this many starts over.
_MAX_FORMS = 512


class Launch:
    """A kernel on a 1-D grid, its constants fixed, for arguments of one form.

    Args:
        kernel: the jitted function; its constants are its last parameters.
        programs: size of the grid; zero launches nothing.
        device: of the tensors. It is made current: a second GPU's tensors would fault on the first.
        constants: values of the kernel's `tl.constexpr` parameters.
        num_warps: of a program.
    """

    def __init__(
        self, kernel: Any, programs: int, device: torch.device, constants: tuple[int, ...], num_warps: int
    ) -> None:
        self._kernel, self._programs, self._constants, self._num_warps = kernel, programs, constants, num_warps
        self._index = device.index if device.type == "cuda" else None
        self._compiled: Callable[..., None] | None = None

    def __call__(self, *args: Any) -> None:
        if self._programs == 0:
            return
        if self._index is None or self._index == torch.cuda.current_device():
            self._launch(args)
        else:
            with torch.cuda.device(self._index):
                self._launch(args)

    def _launch(self, args: tuple[Any, ...]) -> None:
        if self._compiled is not None:
            self._compiled(*args, *self._constants)
            return
        # enable_fp_fusion=False because a bf16 product that is rounded before it is added must not contract into one
        # multiply-add: with it, 10 % of the gate's outputs changed.
        compiled = self._kernel[(self._programs,)](
            *args, *self._constants, num_warps=self._num_warps, enable_fp_fusion=False
        )
        if _DIRECT and compiled is not None:  # None in the interpreter
            self._compiled = compiled[(self._programs, 1, 1)]


class Prepared:
    """A chain's kernel, prepared once for each form of its arguments.

    Args:
        prepare: checks arguments and returns what runs the kernel on arguments of their form; raises KernelDeclined.
    """

    def __init__(self, prepare: Callable[..., Callable[..., Any]]) -> None:
        self._prepare = prepare
        self._known: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        key = tuple(map(_form, args))
        run = self._known.get(key)
        if run is None:
            run = self._prepare(*args)
            if len(self._known) >= _MAX_FORMS:
                self._known.clear()
            self._known[key] = run
        return run(*args)


def _form(value: Any) -> Hashable:
    """All that checks, grids and Triton's specialisation look at; it compiles anew for pointers off 16 bytes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.get_device(), value.shape, value.stride(), value.data_ptr() % 16
    return value  # type: ignore[no-any-return]  # a number, a dtype
