"""silu(a) * b: the middle of the SwiGLU feed-forward w2(silu(w1 x) * w3 x)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .errors import KernelDeclined
from .launch import Launch
from .numerics import CACHED, round_bf16, silu, store_rounded, to_bf16, to_fp32
from .quantise import quantise_reference
from .row_scaling import decline_row_length, scale_rows_reference, store_row_scaled
from .rows import decline_out_dtype, decline_tensor, interpreted

# 2048 elements at 4 warps: 80 us for 4352 tokens on an H200, where 8 warps took 88, and 1024 elements 86.
# The interpreter pays per program.
BLOCK = 1 << 18 if interpreted() else 2048

# By rows: 4096 elements a tile at 16 warps, 90 us for 4352 tokens on an H200; 2048 at 8 warps took 96, 4096 at 8 104.
ROW_TILE = 4096


def silu_mul_reference(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16, row_scaled: bool = False
) -> Any:
    """The chain as both hosts write it: silu is rounded to bf16, then the product."""
    product = F.silu(a) * b
    return scale_rows_reference(product) if row_scaled else quantise_reference(product, out_dtype)


def decline(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16, row_scaled: bool = False
) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    if a.shape != b.shape or a.device != b.device:
        return f"a {list(a.shape)} on {a.device} and b {list(b.shape)} on {b.device} differ"
    if not (a.is_contiguous() and b.is_contiguous()):
        return "a or b is not contiguous"
    reason = decline_tensor("a", a) or decline_tensor("b", b) or decline_out_dtype(out_dtype, a, row_scaled)
    return reason or (decline_row_length(a.shape[-1]) if row_scaled else None)


@triton.jit
def _silu_mul_kernel(a_ptr, b_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    a = to_fp32(tl.load(a_ptr + offsets, mask=inside, other=0.0))
    b = to_fp32(tl.load(b_ptr + offsets, mask=inside, other=0.0))
    store_rounded(out_ptr + offsets, round_bf16(silu(a)) * b, inside, CACHED)


@triton.jit
def _silu_mul_rows_kernel(a_ptr, b_ptr, out_ptr, row_scales_ptr, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)[None, None, :]
    one = tl.full([1, 1, 1], row, dtype=tl.int64)
    products = ()
    for start in tl.static_range(0, N, TILE):
        inside = start + columns < N
        a = to_fp32(tl.load(a_ptr + one * N + start + columns, mask=inside, other=0.0))
        b = to_fp32(tl.load(b_ptr + one * N + start + columns, mask=inside, other=0.0))
        products = products + (to_bf16(round_bf16(silu(a)) * b),)  # type: ignore[assignment]  # noqa: RUF005
    store_row_scaled(out_ptr + one * N, row_scales_ptr + one, one >= 0, products, columns, N, TILE)


def prepare(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16, row_scaled: bool = False
) -> Callable[..., Any]:
    """Checks arguments; what it returns is `silu_mul` for arguments of their form, without checks.

    With `row_scaled` it is `silu_mul_rows`.
    """
    if reason := decline(a, b, out_dtype, row_scaled):
        raise KernelDeclined(reason)
    elements = a.numel()
    if row_scaled:
        constants = a.shape[-1], ROW_TILE
        by_row = Launch(_silu_mul_rows_kernel, elements // a.shape[-1], a.device, constants, num_warps=16)

        def run_rows(a: torch.Tensor, b: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
            out = torch.empty_like(a, dtype=out_dtype)
            row_scales = torch.empty(a.shape[:-1], dtype=torch.float32, device=a.device)
            by_row(a, b, out, row_scales)
            return out, row_scales

        return run_rows
    launch = Launch(_silu_mul_kernel, triton.cdiv(elements, BLOCK), a.device, (BLOCK,), num_warps=4)

    def run(a: torch.Tensor, b: torch.Tensor, *_: object) -> torch.Tensor:
        out = torch.empty_like(a, dtype=out_dtype)
        launch(a, b, out, elements)
        return out

    return run


def silu_mul(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """bf16(bf16(a / (1 + exp(-a))) * b), inside in fp32.

    Args:
        a: bf16, contiguous, any shape; the output of w1.
        b: like `a`; the output of w3.
        out_dtype: bfloat16, or float8_e4m3fn for a Linear that quantises its input with scale 1.

    Returns:
        `out_dtype` of the same shape; byte-equal on CUDA to `silu_mul_reference` for all 65,536 values of `a`.

    Raises:
        KernelDeclined: the arguments are outside the above; the message says which and why.
    """
    out: torch.Tensor = prepare(a, b, out_dtype)(a, b)
    return out


def silu_mul_rows(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu_mul`, each row scaled as `row_scaling` does.

    Args:
        a: [..., K] bf16, contiguous, K at most 16384, on a GPU of compute capability 8.9.
        b: like `a`.

    Returns:
        float8_e4m3fn like `a` and the scales, [...] float32; byte-equal to the reference for finite values.

    Raises:
        KernelDeclined: the arguments are outside the above; the message says which and why.
    """
    out: tuple[torch.Tensor, torch.Tensor] = prepare(a, b, torch.float8_e4m3fn, row_scaled=True)(a, b)
    return out


@torch.library.custom_op("ideogram4_fusion::silu_mul", mutates_args=())
def silu_mul_op(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`silu_mul` as an operator that torch.compile keeps whole."""
    return silu_mul(a, b, out_dtype)


@silu_mul_op.register_fake
def _(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty_like(a, dtype=out_dtype)
