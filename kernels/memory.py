"""What PyTorch and Triton raise when memory is not enough."""

from __future__ import annotations

import torch

_NO_MEMORY = 2  # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY
# In the words of: the CUDA runtime and driver (Triton's launcher quotes the latter), cuBLAS and cuDNN where they make a
# handle or a workspace, PyTorch's allocator on the CPU.
_WORDS = ("out of memory", "STATUS_ALLOC_FAILED", "allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. Only PyTorch's own allocator on a GPU has an exception for it.

    With CUDA's asynchronous allocator, ComfyUI's default, it often comes as an AcceleratorError of whatever asks next.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return getattr(error, "error_code", None) == _NO_MEMORY or any(words in str(error) for words in _WORDS)
