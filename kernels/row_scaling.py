"""Rows written as fp8 with a scale each, so that the largest value of a row meets fp8's largest.

scale = max |row| / 448 and q = fp8(row * (448 / max |row|)), for products with one scale a row (`torch._scaled_mm`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP8_MAX = 448.0  # torch.finfo(torch.float8_e4m3fn).max

# In place of the maximum of a row of zeros, which has no reciprocal; far below any row that carries something.
LEAST = 1e-12

# A program keeps its row in registers.
MAX_ROW = 16384

_FP8_MAX, _LEAST = tl.constexpr(FP8_MAX), tl.constexpr(LEAST)


def scale_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., K] bf16, finite -> float8_e4m3fn of the same shape, and [...] float32 scales."""
    largest = x.abs().amax(dim=-1).float().clamp(min=LEAST)
    # A division by a tensor: by a number, PyTorch multiplies by its reciprocal, which rounds twice.
    most = torch.full_like(largest, FP8_MAX)
    scaled = x.float() * (most / largest)[..., None]
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), largest / most


def decline_row_length(size: int) -> str | None:
    """Why no kernel keeps a row of that many elements in registers, or None."""
    return f"a row of {size} elements is longer than {MAX_ROW}" if size > MAX_ROW else None


@triton.jit
def row_scale(largest):
    """[ROWS] maxima -> what a row is multiplied by, and the scale that undoes it."""
    largest = tl.maximum(largest, _LEAST)
    return tl.div_rn(_FP8_MAX, largest), tl.div_rn(largest, _FP8_MAX)


@triton.jit
def to_row_scaled(x, factor):
    """fp32 values times their row's factor, as fp8."""
    return tl.minimum(tl.maximum(x * factor, -_FP8_MAX), _FP8_MAX).to(tl.float8e4nv)


@triton.jit
def store_row_scaled(out_ptr, scales, valid, products, columns, N: tl.constexpr, TILE: tl.constexpr):
    """Stores a row that lies in registers.

    Args:
        out_ptr: [ROWS, 1, 1], where the rows begin.
        scales: [ROWS, 1, 1], where their scales go.
        valid: [ROWS, 1, 1], whether there is such a row.
        products: a tuple of tiles [ROWS, LANES, VECTOR] in bf16, zero beyond the row.
        columns: [1, LANES, VECTOR].
    """
    largest = tl.abs(products[0].to(tl.float32))
    for start in tl.static_range(TILE, N, TILE):
        largest = tl.maximum(largest, tl.abs(products[start // TILE].to(tl.float32)))
    factor, scale = row_scale(tl.max(tl.max(largest, axis=2), axis=1)[:, None, None])
    tl.store(scales, scale, mask=valid)
    for start in tl.static_range(0, N, TILE):
        inside = valid & (start + columns < N) if start + TILE > N else valid
        scaled = to_row_scaled(products[start // TILE].to(tl.float32), factor)
        tl.store(out_ptr + start + columns, scaled, mask=inside)
