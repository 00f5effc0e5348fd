"""bf16 -> fp8 where no other kernel wrote it: with scale 1, as ComfyUI's fp8 Linear does to its input, or by rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .errors import KernelDeclined
from .launch import Launch
from .numerics import CACHED, store_rounded, to_fp32
from .row_scaling import FP8_MAX, decline_row_length, store_row_scaled
from .rows import decline_out_dtype, decline_tensor, interpreted

BLOCK = 1 << 18 if interpreted() else 2048

# By rows, at 4 warps: 16.3 us for 4352 tokens on an H200, where 8 warps took 17.1 and 16 took 20.
ROW_TILE = 2048


def quantise_reference(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """`x` [...] bf16 as `dtype`: itself as bfloat16, clamped to +-448 and converted as float8_e4m3fn."""
    return x if dtype == x.dtype else x.clamp(-FP8_MAX, FP8_MAX).to(dtype)


def decline(x: torch.Tensor) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    if not x.is_contiguous():
        return "what is to be quantised is not contiguous"
    return decline_tensor("what is to be quantised", x) or decline_out_dtype(torch.float8_e4m3fn, x)


def decline_by_rows(x: torch.Tensor) -> str | None:
    """Why `quantise_rows` does not take these arguments, or None."""
    return decline(x) or decline_row_length(x.shape[-1])


@triton.jit
def _quantise_kernel(x_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    store_rounded(out_ptr + offsets, to_fp32(tl.load(x_ptr + offsets, mask=inside, other=0.0)), inside, CACHED)


@triton.jit
def _quantise_rows_kernel(x_ptr, out_ptr, row_scales_ptr, N: tl.constexpr, TILE: tl.constexpr):
    one = tl.full([1, 1, 1], tl.program_id(0), dtype=tl.int64)
    columns = tl.arange(0, TILE)[None, None, :]
    rows = ()
    for start in tl.static_range(0, N, TILE):
        x = tl.load(x_ptr + one * N + start + columns, mask=start + columns < N, other=0.0)
        rows = rows + (x,)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no starred tuples
    store_row_scaled(out_ptr + one * N, row_scales_ptr + one, one >= 0, rows, columns, N, TILE)


def prepare(x: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Checks arguments; what it returns is `quantise` for arguments of their form, without checks."""
    if reason := decline(x):
        raise KernelDeclined(reason)
    elements = x.numel()
    launch = Launch(_quantise_kernel, triton.cdiv(elements, BLOCK), x.device, (BLOCK,), num_warps=4)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        launch(x, out, elements)
        return out

    return run


def quantise(x: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn(clamp(x, -448, 448)).

    Args:
        x: bf16, contiguous, any shape, on a GPU of compute capability 8.9.

    Returns:
        float8_e4m3fn of the same shape; byte-equal to `quantise_reference` for all finite values and infinities.

    Raises:
        KernelDeclined: the argument is outside the above; the message says which and why.
    """
    return prepare(x)(x)


def prepare_by_rows(x: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Checks arguments; what it returns is `quantise_rows` for arguments of their form, without checks."""
    if reason := decline_by_rows(x):
        raise KernelDeclined(reason)
    size = x.shape[-1]
    launch = Launch(_quantise_rows_kernel, x.numel() // size, x.device, (size, ROW_TILE), num_warps=4)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        row_scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        launch(x, out, row_scales)
        return out, row_scales

    return run


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row to its own scale, as `row_scaling` does it.

    Args:
        x: [..., K] bf16, contiguous, K at most 16384, on a GPU of compute capability 8.9.

    Returns:
        float8_e4m3fn of the same shape and the scales, [...] float32; byte-equal to `scale_rows_reference` for finite
        values.

    Raises:
        KernelDeclined: the argument is outside the above; the message says which and why.
    """
    return prepare_by_rows(x)(x)


@torch.library.custom_op("ideogram4_fusion::quantise", mutates_args=())
def quantise_op(x: torch.Tensor) -> torch.Tensor:
    """`quantise` as an operator that torch.compile keeps whole."""
    return quantise(x)


@quantise_op.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float8_e4m3fn)
