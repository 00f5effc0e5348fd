"""Which failures mean that memory was not enough: those of a kernel's own limits, or of its arguments, do not."""

from __future__ import annotations

import errno

import pytest
import torch

pytest.importorskip("triton")

from ideogram4_fusion.kernels.memory import is_out_of_memory
from triton.runtime.errors import OutOfResources


def accelerator_error(message: str, code: int | None) -> Exception:
    """What C10_CUDA_CHECK raises, in a PyTorch that has it."""
    error: Exception = getattr(torch, "AcceleratorError", RuntimeError)(message)
    if code is not None:
        error.error_code = code  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB."),
        MemoryError(),
        accelerator_error("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere", None),
        accelerator_error("CUDA-Fehler", 2),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    ],
    ids=str,
)
def test_what_says_that_memory_was_not_enough(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_what_this_machine_says_itself() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert is_out_of_memory(caught.value)


def test_what_a_compiler_or_an_interpreter_wraps() -> None:
    with pytest.raises(ValueError, match="wrapped") as caught:
        try:
            raise MemoryError
        except MemoryError as error:
            raise ValueError("wrapped") from error
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        OutOfResources(300_000, 232_448, "shared memory"),
        accelerator_error("CUDA error: an illegal memory access was encountered", 700),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        ValueError("out of memory"),
        OSError(errno.ENOENT, "No such file or directory"),
        RuntimeError("libgomp.so.1: cannot allocate memory in static TLS block"),
    ],
    ids=str,
)
def test_what_says_something_else(error: Exception) -> None:
    assert not is_out_of_memory(error)
