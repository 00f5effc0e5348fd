"""The sum of squares of a row, added up in the order of ATen's CUDA rms_norm.

ATen gives a row of a vectorised rms_norm to 128 threads that read four neighbours at a time: thread t takes the
elements 512*k + 4*t + e and adds their squares one after another, k outside, e inside. The 32 lanes of a warp are then
folded by halves (16, 8, 4, 2, 1), and the four warps as (0 + 2) + (1 + 3). Source: `aten/src/ATen/native/cuda/
layer_norm_kernel.cu`, `vectorized_layer_norm_kernel` with `rms_norm` set, as in PyTorch 2.11. A bf16 square is exact in
fp32, so a fused multiply-add and a multiply followed by an add give the same sum.

`tl.sum` is used over two elements at a time: over more, its order has changed between Triton versions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import rsqrt

LANES = tl.constexpr(128)
VECTOR = tl.constexpr(4)
TILE = tl.constexpr(512)  # LANES * VECTOR


@triton.jit
def tile_columns():
    """Column numbers of one tile, [1, LANES, VECTOR]."""
    return tl.arange(0, LANES)[None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]


@triton.jit
def add_squares(total, tile, ROWS: tl.constexpr):
    """Adds a tile's squares to each lane's running total, element 0 to 3: [ROWS, LANES], [ROWS, LANES, VECTOR]."""
    even, odd = tl.split(tl.reshape(tile, (ROWS, LANES, 2, 2)))
    e0, e2 = tl.split(even)
    e1, e3 = tl.split(odd)
    total = tl.fma(e0, e0, total)
    total = tl.fma(e1, e1, total)
    total = tl.fma(e2, e2, total)
    return tl.fma(e3, e3, total)


@triton.jit
def fold_lanes(total, ROWS: tl.constexpr):
    """Adds the 128 running totals up: [ROWS, LANES] -> [ROWS].

    The lane's number is taken apart into its bits, warp (2) and lane in the warp (5), upper bits first; adding the two
    values of one bit is folding by halves.
    """
    v = tl.reshape(total, (ROWS, 2, 2, 2, 2, 2, 2, 2))
    v = tl.sum(v, axis=3)  # lanes 16 apart
    v = tl.sum(v, axis=3)
    v = tl.sum(v, axis=3)
    v = tl.sum(v, axis=3)
    v = tl.sum(v, axis=3)  # neighbours
    v = tl.sum(v, axis=1)  # warps 0 + 2 and 1 + 3
    return tl.sum(v, axis=1)


@triton.jit
def reciprocal_rms(total, eps, N: tl.constexpr, ROWS: tl.constexpr):
    """1 / sqrt(mean square + eps) out of a row's running totals: [ROWS, LANES] -> [ROWS, 1, 1]."""
    return rsqrt(tl.div_rn(fold_lanes(total, ROWS), N * 1.0) + eps)[:, None, None]


@triton.jit
def row_offset(row, tokens, batch_stride, token_stride):
    """Where row number `row` of [B, T, D] begins; a stride is 0 where the tensor is broadcast."""
    return (row // tokens) * batch_stride + (row % tokens) * token_stride
