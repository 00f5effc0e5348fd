"""The gate behind attention and the modulated norm in front of the feed-forward, in one pass over the row.

x' = x + gate * RMSNorm(branch), h = RMSNorm(x') * (1 + scale): x' is read back from registers, not from memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .errors import KernelDeclined
from .launch import Launch
from .numerics import STREAMING, to_bf16, to_fp32
from .rms_norm_gate import decline as decline_gate
from .rms_norm_gate import gate_tile, load_branch, rms_norm_gate_reference
from .rms_norm_modulate import rms_norm_modulate_reference, store_modulated
from .row_reduction import LANES, TILE, add_squares, reciprocal_rms, row_offset, tile_columns
from .rows import (
    ROWS_PER_PROGRAM,
    broadcast_strides,
    decline_modulation,
    decline_out_dtype,
    decline_weight,
)


def rms_norm_gate_modulate_reference(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    next_weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    next_eps: float,
    out_dtype: torch.dtype = torch.bfloat16,
    row_scaled: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The two chains one after the other."""
    gated = rms_norm_gate_reference(x, branch, weight, gate, eps)
    out = rms_norm_modulate_reference(gated, next_weight, scale, next_eps, out_dtype, row_scaled)
    return (gated, *out) if isinstance(out, tuple) else (gated, out)


def decline(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    next_weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    next_eps: float,
    out_dtype: torch.dtype = torch.bfloat16,
    row_scaled: bool = False,
) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    return (
        decline_gate(x, branch, weight, gate, eps)
        or decline_weight(next_weight, x)
        or decline_modulation("scale", scale, x)
        or decline_out_dtype(out_dtype, x, row_scaled)
    )


@triton.jit
def _rms_norm_gate_modulate_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    gate_ptr,
    next_weight_ptr,
    scale_ptr,
    gated_ptr,
    out_ptr,
    row_scales_ptr,
    rows,
    tokens,
    x_batch_stride,
    x_token_stride,
    branch_batch_stride,
    branch_token_stride,
    gate_batch_stride,
    gate_token_stride,
    scale_batch_stride,
    scale_token_stride,
    eps,
    next_eps,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_SCALED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    valid = row < rows
    x_ptr += row_offset(row, tokens, x_batch_stride, x_token_stride)
    branch_ptr += row_offset(row, tokens, branch_batch_stride, branch_token_stride)
    gate_ptr += row_offset(row, tokens, gate_batch_stride, gate_token_stride)
    scale_ptr += row_offset(row, tokens, scale_batch_stride, scale_token_stride)
    gated_ptr += row * N
    out_ptr += row * N
    columns = tile_columns()

    total, tiles, residuals = load_branch(branch_ptr, x_ptr, valid, columns, N, ROWS)
    rstd = reciprocal_rms(total, eps, N, ROWS)

    total = tl.zeros([ROWS, LANES], dtype=tl.float32)
    gated_tiles = ()
    for start in tl.static_range(0, N, TILE):
        inside = valid & (start + columns < N) if start + TILE > N else valid
        tile, residual = tiles[start // TILE], residuals[start // TILE]
        weights, gates = weight_ptr + start + columns, gate_ptr + start + columns
        gated = gate_tile(tile, residual, rstd, weights, gates, start + columns < N, inside)
        gated = tl.where(inside, to_bf16(gated), 0.0)
        tl.store(gated_ptr + start + columns, gated, mask=inside, cache_modifier=STREAMING)
        total = add_squares(total, to_fp32(gated), ROWS)
        gated_tiles = gated_tiles + (gated,)  # type: ignore[assignment]  # noqa: RUF005
    rstd = reciprocal_rms(total, next_eps, N, ROWS)

    store_modulated(
        out_ptr, row_scales_ptr + row, valid, gated_tiles, rstd, next_weight_ptr, scale_ptr, columns, N, ROW_SCALED
    )


def prepare(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    next_weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    next_eps: float,
    out_dtype: torch.dtype = torch.bfloat16,
    row_scaled: bool = False,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Checks arguments; what it returns is `rms_norm_gate_modulate` for arguments of their form, without checks.

    With `row_scaled` it is `rms_norm_gate_modulate_rows`.
    """
    if reason := decline(x, branch, weight, gate, next_weight, scale, eps, next_eps, out_dtype, row_scaled):
        raise KernelDeclined(reason)
    batch, tokens, hidden = x.shape
    rows = batch * tokens
    strides = (
        *(x.stride(0), x.stride(1), branch.stride(0), branch.stride(1)),
        *broadcast_strides(gate),
        *broadcast_strides(scale),
    )
    constants = hidden, ROWS_PER_PROGRAM, row_scaled
    programs = triton.cdiv(rows, ROWS_PER_PROGRAM)
    launch = Launch(_rms_norm_gate_modulate_kernel, programs, x.device, constants, num_warps=4)

    def run(
        x: torch.Tensor,
        branch: torch.Tensor,
        weight: torch.Tensor,
        gate: torch.Tensor,
        next_weight: torch.Tensor,
        scale: torch.Tensor,
        eps: float,
        next_eps: float,
        *_: object,
    ) -> tuple[torch.Tensor, ...]:
        gated = torch.empty_like(x, memory_format=torch.contiguous_format)
        out = torch.empty_like(gated, dtype=out_dtype)
        inputs = x, branch, weight, gate, next_weight, scale
        if not row_scaled:
            launch(*inputs, gated, out, out, rows, tokens, *strides, eps, next_eps)
            return gated, out
        row_scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        launch(*inputs, gated, out, row_scales, rows, tokens, *strides, eps, next_eps)
        return gated, out, row_scales

    return run


def rms_norm_gate_modulate(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    next_weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    next_eps: float,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_gate` and, on its result, `rms_norm_modulate`.

    Args:
        x: the residual, [B, T, D] bf16; batch and token strides are free, D a multiple of 4 and at most 8192.
        branch: output of attention, like `x`.
        weight: [D] bf16, of the norm behind attention.
        gate: [1 or B, 1 or T, D] bf16, behind tanh; may be a strided `chunk` of the modulation.
        next_weight: [D] bf16, of the norm in front of the feed-forward.
        scale: like `gate`, before 1 is added.
        eps: added to the mean square of `branch`.
        next_eps: added to the mean square of the first result.
        out_dtype: of the second result, bfloat16 or float8_e4m3fn.

    Returns:
        The gated residual, [B, T, D] bf16, and its modulated norm, [B, T, D] of `out_dtype`; byte-equal on CUDA to
        `rms_norm_gate_modulate_reference`.

    Raises:
        KernelDeclined: the arguments are outside the above; the message says which and why.
    """
    arguments = (x, branch, weight, gate, next_weight, scale, eps, next_eps, out_dtype)
    gated, out = prepare(*arguments)(*arguments)
    return gated, out


def rms_norm_gate_modulate_rows(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    next_weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    next_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rms_norm_gate_modulate`, each row of its second result scaled as `row_scaling` does.

    Returns:
        The gated residual, [B, T, D] bf16, its modulated norm, [B, T, D] float8_e4m3fn, and its scales, [B, T] float32.

    Raises:
        KernelDeclined: as `rms_norm_gate_modulate`, or the GPU has no fp8.
    """
    arguments = (x, branch, weight, gate, next_weight, scale, eps, next_eps, torch.float8_e4m3fn, True)
    gated, out, row_scales = prepare(*arguments)(*arguments)
    return gated, out, row_scales


@torch.library.custom_op("ideogram4_fusion::rms_norm_gate_modulate", mutates_args=())
def rms_norm_gate_modulate_op(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    next_weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    next_eps: float,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_gate_modulate` as an operator that torch.compile keeps whole."""
    return rms_norm_gate_modulate(x, branch, weight, gate, next_weight, scale, eps, next_eps, out_dtype)


@rms_norm_gate_modulate_op.register_fake
def _(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    next_weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    next_eps: float,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor]:
    gated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return gated, torch.empty(x.shape, dtype=out_dtype, device=x.device)
