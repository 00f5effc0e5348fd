"""Rounding and elementary functions that agree with ATen's, on the GPU and in Triton's CPU interpreter."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .rows import interpreted

# How a kernel stores: as usual, or streaming, so that it does not push out of the cache what it reads again.
CACHED, STREAMING = tl.constexpr(""), tl.constexpr(".cs")

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def to_fp32(x):
    """bf16 -> fp32, exact; by bits in the interpreter, whose own cast spoils subnormal numbers."""
    if INTERPRETED:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def to_bf16(x):
    """fp32 -> bf16, to nearest, ties to even; by bits in the interpreter, whose own cast cuts the low half off.

    A NaN keeps its upper half, made quiet: the rounding could carry its mantissa over into an infinity.
    """
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def round_bf16(x):
    """fp32 -> the nearest bf16 value, kept in fp32: where eager PyTorch would have stored a bf16 tensor."""
    return to_fp32(to_bf16(x))


@triton.jit
def store_rounded(pointers, x, mask, CACHE: tl.constexpr):
    """Stores fp32 values as bf16, or as the fp8 that quantising the bf16 values with scale 1 gives.

    The latter is what ComfyUI's fp8 Linear does to its input: clamp to +-448, then convert. `CACHE` is a
    cache modifier, without a default, since Triton 3.6 does not take a string for one.
    """
    if pointers.dtype.element_ty == tl.float8e4nv:
        bounded = tl.minimum(tl.maximum(round_bf16(x), -448.0), 448.0)
        tl.store(pointers, bounded.to(tl.float8e4nv), mask=mask, cache_modifier=CACHE)
    else:
        tl.store(pointers, to_bf16(x), mask=mask, cache_modifier=CACHE)


@triton.jit
def rsqrt(x):
    """CUDA's `rsqrtf`, which ATen's rms_norm calls; libdevice does not exist in the interpreter."""
    if INTERPRETED:
        return tl.rsqrt(x)
    return libdevice.rsqrt(x)


@triton.jit
def silu(x):
    """x / (1 + exp(-x)) in fp32 with IEEE division: ATen's `silu` before its one rounding.

    `tl.sigmoid` and `/` would take approximate instructions.
    """
    if INTERPRETED:
        return tl.div_rn(x, 1.0 + tl.exp(-x))
    return tl.div_rn(x, 1.0 + libdevice.exp(-x))
