"""x * cos + rotate_half(x) * sin with every product rounded: the RoPE of hosts that run it as eager bf16 operations.

Hosts whose rotary embedding rounds elsewhere (fp32 tables with one final rounding, say) keep their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .errors import KernelDeclined
from .launch import Launch
from .numerics import round_bf16, to_bf16, to_fp32
from .rows import decline_tensor, interpreted

# Heads of one token lie side by side: 8 rows of 256 make 4 KB, one program's worth of reads at 4 warps.
ROWS = 2048 if interpreted() else 8


def rotate_half_rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The chain as diffusers writes it: both products and their sum are rounded to bf16."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (rotated * sin)


def decline(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    if x.ndim != 4 or x.shape[-1] % 2:
        return f"x {list(x.shape)} is not [batch, tokens, heads, an even head size]"
    batch, tokens, _, size = x.shape
    if cos.shape != sin.shape or cos.stride() != sin.stride() or cos.device != x.device:
        return f"cos {list(cos.shape)} and sin {list(sin.shape)} differ in shape, strides or device"
    if cos.ndim != 3 or cos.shape[0] not in (1, batch) or cos.shape[1:] != (tokens, size):
        return f"cos {list(cos.shape)} does not fit x {list(x.shape)}"
    return decline_tensor("x", x) or decline_tensor("cos", cos) or decline_tensor("sin", sin)


@triton.jit
def _rotate_half_rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    rows,
    tokens,
    heads,
    x_batch_stride,
    x_token_stride,
    x_head_stride,
    table_batch_stride,
    table_token_stride,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    inside = (row < rows) & (column < HALF)
    head = row % heads
    token = (row // heads) % tokens
    batch = row // heads // tokens
    x_ptr += batch * x_batch_stride + token * x_token_stride + head * x_head_stride + column
    table = batch * table_batch_stride + token * table_token_stride + column
    out_ptr += row * (2 * HALF) + column

    lower = to_fp32(tl.load(x_ptr, mask=inside, other=0.0))
    upper = to_fp32(tl.load(x_ptr + HALF, mask=inside, other=0.0))
    lower_cos = to_fp32(tl.load(cos_ptr + table, mask=inside, other=0.0))
    upper_cos = to_fp32(tl.load(cos_ptr + table + HALF, mask=inside, other=0.0))
    lower_sin = to_fp32(tl.load(sin_ptr + table, mask=inside, other=0.0))
    upper_sin = to_fp32(tl.load(sin_ptr + table + HALF, mask=inside, other=0.0))

    tl.store(out_ptr, to_bf16(round_bf16(lower * lower_cos) + round_bf16(-upper * lower_sin)), mask=inside)
    tl.store(out_ptr + HALF, to_bf16(round_bf16(upper * upper_cos) + round_bf16(lower * upper_sin)), mask=inside)


def prepare(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Checks arguments; what it returns is `rotate_half_rope` for arguments of their form, without checks."""
    if reason := decline(x, cos, sin):
        raise KernelDeclined(reason)
    batch, tokens, heads, size = x.shape
    rows = batch * tokens * heads
    strides = (x.stride(0), x.stride(1), x.stride(2), cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1))
    constants = size // 2, triton.next_power_of_2(size // 2), ROWS
    launch = Launch(_rotate_half_rope_kernel, triton.cdiv(rows, ROWS), x.device, constants, num_warps=4)

    def run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        launch(x, cos, sin, out, rows, tokens, heads, *strides)
        return out

    return run


def rotate_half_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """bf16(bf16(x * cos) + bf16(rotate_half(x) * sin)), rotate_half(x) = (-upper half, lower half).

    Args:
        x: [B, T, heads, head size] bf16; all strides but the last are free, the head size is even.
        cos: [1 or B, T, head size] bf16.
        sin: like `cos`, strides included.

    Returns:
        bf16, contiguous, shaped like `x`; byte-equal to `rotate_half_rope_reference`.

    Raises:
        KernelDeclined: the arguments are outside the above; the message says which and why.
    """
    return prepare(x, cos, sin)(x, cos, sin)


@torch.library.custom_op("ideogram4_fusion::rotate_half_rope", mutates_args=())
def rotate_half_rope_op(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`rotate_half_rope` as an operator that torch.compile keeps whole."""
    return rotate_half_rope(x, cos, sin)


@rotate_half_rope_op.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
