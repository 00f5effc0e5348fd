"""What the row-wise kernels share: which tensors they take, and rows per program."""

from __future__ import annotations

import os

import torch

# A row is kept in registers between its two passes: 36 fp32 a thread at 4608. 16384 would be 128, and spills.
MAX_HIDDEN_SIZE = 8192


def interpreted() -> bool:
    """Whether Triton runs its kernels in the CPU interpreter; it reads the variable once, when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


# The GPU runs one row a program: 2 or 4 rows at 4 warps were slower on an H200. The interpreter's cost is per program
# (about 7 ms) and hardly per element, so there a program takes many rows.
ROWS_PER_PROGRAM = 64 if interpreted() else 1


def decline_tensor(name: str, x: torch.Tensor) -> str | None:
    """Why no kernel takes this tensor, or None: they take bf16, contiguous in the last dimension, on a GPU."""
    if x.dtype != torch.bfloat16:
        return f"{name} is {str(x.dtype).removeprefix('torch.')}, the kernels take bfloat16"
    if not (x.is_cuda or interpreted()):
        return f"{name} is on {x.device.type}, the kernels run on a GPU"
    if x.ndim == 0:
        return f"{name} has no dimensions"
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return f"the last dimension of {name} is strided"
    return None


def decline_hidden_size(size: int) -> str | None:
    """Why no row kernel takes this hidden size, or None."""
    if size % 4:
        return f"hidden size {size} is not a multiple of 4, where ATen adds in another order"
    if size > MAX_HIDDEN_SIZE:
        return f"hidden size {size} is larger than {MAX_HIDDEN_SIZE}"
    return None


def decline_rows(name: str, x: torch.Tensor) -> str | None:
    """Why a row kernel does not take `x` [B, T, D], or None."""
    if x.ndim != 3:
        return f"{name} has {x.ndim} dimensions, not [batch, tokens, hidden]"
    return decline_tensor(name, x) or decline_hidden_size(x.shape[-1])


def decline_modulation(name: str, m: torch.Tensor, x: torch.Tensor) -> str | None:
    """Why `m` cannot modulate `x` [B, T, D], or None: it is [1 or B, 1 or T, D], and may be a strided slice."""
    if m.ndim != 3 or m.shape[-1] != x.shape[-1] or m.shape[0] not in (1, x.shape[0]):
        return f"{name} {list(m.shape)} does not broadcast over {list(x.shape)}"
    if m.shape[1] not in (1, x.shape[1]):
        return f"{name} {list(m.shape)} does not broadcast over {list(x.shape)}"
    if m.device != x.device:
        return f"{name} is on {m.device}, not on {x.device}"
    return decline_tensor(name, m)


def decline_weight(weight: torch.Tensor, x: torch.Tensor) -> str | None:
    """Why `weight` cannot scale the rows of `x`, or None: it is a contiguous [D] beside `x`."""
    if weight.shape != x.shape[-1:]:
        return f"the norm weight {list(weight.shape)} does not fit hidden size {x.shape[-1]}"
    if weight.device != x.device:
        return f"the norm weight is on {weight.device}, not on {x.device}"
    return decline_tensor("the norm weight", weight)


def inexact_sum(device: torch.device) -> str | None:
    """Why a row's sum is not ATen's to the last bit on a device, or None.

    A difference shows in about one value of a million, so a small model can seem equal for a while.
    """
    return None if device.type == "cuda" else f"ATen adds a row up in another order on the {device.type.upper()}"


OUT_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)

# NVIDIA's first with e4m3 conversions, as a compute capability.
FP8_CAPABILITY = (8, 9)


def decline_out_dtype(dtype: torch.dtype, x: torch.Tensor, row_scaled: bool = False) -> str | None:
    """Why no kernel writes `dtype` beside `x`, or None."""
    if row_scaled and dtype != torch.float8_e4m3fn:
        return f"rows are scaled as float8_e4m3fn, not as {str(dtype).removeprefix('torch.')}"
    if dtype not in OUT_DTYPES:
        return f"the kernels write bfloat16 or float8_e4m3fn, not {str(dtype).removeprefix('torch.')}"
    if dtype == torch.float8_e4m3fn and not (
        x.is_cuda and torch.cuda.get_device_capability(x.device) >= FP8_CAPABILITY
    ):
        return "float8_e4m3fn needs a GPU of compute capability 8.9"
    return None


def broadcast_strides(m: torch.Tensor) -> tuple[int, int]:
    """Strides of `m` [1 or B, 1 or T, D] over batch and tokens, 0 where it is broadcast."""
    return (m.stride(0) if m.shape[0] > 1 else 0), (m.stride(1) if m.shape[1] > 1 else 0)
