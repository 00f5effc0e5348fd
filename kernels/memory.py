"""What PyTorch, Triton and the system raise when memory is not enough."""

from __future__ import annotations

import errno

import torch

_NO_MEMORY = 2  # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY
# Of the CUDA runtime and driver (Triton's launcher quotes the latter), of cuBLAS, of cuDNN, of PyTorch's allocator on
# the CPU; in lower case, spaces for underscores.
_WORDS = ("out of memory", "status alloc failed", "allocation failed", "defaultcpuallocator")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in `error` or in what it was raised from.

    Only PyTorch's own allocator on a GPU has an exception for it. With CUDA's asynchronous allocator, ComfyUI's
    default, it often comes as an AcceleratorError of whatever asks next.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        text = str(error).lower().replace("_", " ")
        if getattr(error, "error_code", None) == _NO_MEMORY or any(words in text for words in _WORDS):
            return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)
