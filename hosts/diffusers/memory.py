"""What PyTorch raises when memory is not enough."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on the CPU a plain RuntimeError, which only its words tell apart."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate" in str(error)
