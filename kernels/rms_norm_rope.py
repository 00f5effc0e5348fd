"""RMSNorm and rotary embedding of queries and keys as comfy-kitchen's CUDA kernel `rms_rope_split_half` rounds them.

Found by comparing 2e7 of its values with every plausible order (comfy-kitchen 0.2.31 on an H200, none differs): a warp
adds up one head, lane l the squares of l, l + 32, l + 64, ... one after another, and folds its lanes by halves. The
norm is rounded to bf16. The rotation is fp32: c * x0 is added to the rounded product s * x1 in one multiply-add, and
rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .errors import KernelDeclined
from .numerics import round_bf16, rsqrt, to_bf16, to_fp32
from .rows import decline_tensor, launch

WARP = tl.constexpr(32)

# One warp takes a token and goes through its heads four at a time, the rotations in registers: 30 us for 4352 tokens of
# 18 heads on an H200. A program for every four heads took 50 us, and more warps a program up to 310.
STEP = 4


def rms_norm_rope_reference(x: torch.Tensor, weight: torch.Tensor, freqs: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in PyTorch operations, the squares added in the kernel's order."""
    half = x.shape[-1] // 2
    squares = x.float().square().unflatten(-1, (-1, 32))
    total = squares[..., 0, :]
    for part in squares.unbind(-2)[1:]:
        total = total + part
    while total.shape[-1] > 1:
        lower, upper = total.chunk(2, dim=-1)
        total = lower + upper
    rstd = torch.rsqrt(total / x.shape[-1] + eps)
    normed = (x.float() * rstd * weight.float()).to(x.dtype).float()
    x0, x1 = normed[..., :half], normed[..., half:]
    # Exact products, so that adding in fp64 and rounding to fp32 is what a fused multiply-add gives.
    first = (freqs[..., 0, 0].double() * x0.double() + (freqs[..., 0, 1] * x1).double()).float()
    second = (freqs[..., 1, 0].double() * x0.double() + (freqs[..., 1, 1] * x1).double()).float()
    return torch.cat((first, second), dim=-1).to(x.dtype)


def decline(x: torch.Tensor, weight: torch.Tensor, freqs: torch.Tensor, eps: float) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    if x.ndim != 4 or x.shape[-1] % 64 or x.shape[-1] & (x.shape[-1] - 1):
        return f"x {list(x.shape)} is not [batch, tokens, heads, a power of two from 64 on]"
    batch, tokens, _, size = x.shape
    if freqs.shape[1:] != (tokens, 1, size // 2, 2, 2) or freqs.shape[0] not in (1, batch):
        return f"the rotations {list(freqs.shape)} do not fit x {list(x.shape)}"
    if freqs.dtype != torch.float32 or not freqs[0].is_contiguous() or freqs.device != x.device:
        return "the rotations are not contiguous float32 beside x"
    if weight.shape != (size,) or weight.device != x.device:
        return f"the norm weight {list(weight.shape)} does not fit a head of {size}"
    return decline_tensor("x", x) or decline_tensor("the norm weight", weight)


def inexact_rotation(device: torch.device) -> str | None:
    """Why the kernel is not comfy-kitchen's to the last bit on a device, or None."""
    return None if device.type == "cuda" else f"comfy-kitchen rounds otherwise on the {device.type.upper()}"


@triton.jit
def _rms_norm_rope_kernel(
    x_ptr,
    weight_ptr,
    freqs_ptr,
    out_ptr,
    tokens,
    x_batch_stride,
    x_token_stride,
    x_head_stride,
    freqs_batch_stride,
    eps,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0)
    batch, token = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
    lane = tl.arange(0, WARP)[None, :]
    PARTS: tl.constexpr = SIZE // WARP
    x_ptr += batch * x_batch_stride + token * x_token_stride + lane
    freqs_ptr += batch * freqs_batch_stride + token * (2 * SIZE)
    out_ptr += row.to(tl.int64) * (HEADS * SIZE) + lane

    rotations = ()
    weights = ()
    for part in tl.static_range(PARTS // 2):
        quads = lane[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        rotation = tl.reshape(tl.load(freqs_ptr + part * (4 * WARP) + quads), (1, WARP, 2, 2))
        f00_f10, f01_f11 = tl.split(rotation)
        f00, f10 = tl.split(f00_f10)
        f01, f11 = tl.split(f01_f11)
        w0 = to_fp32(tl.load(weight_ptr + part * WARP + lane))
        w1 = to_fp32(tl.load(weight_ptr + SIZE // 2 + part * WARP + lane))
        rotations = rotations + ((f00, f01, f10, f11),)  # type: ignore[assignment]  # noqa: RUF005
        weights = weights + ((w0, w1),)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no starred tuples

    for start in tl.static_range(0, HEADS, STEP):
        head = start + tl.arange(0, STEP)[:, None]
        valid = (head < HEADS) & (lane < WARP)
        total = tl.zeros([STEP, WARP], dtype=tl.float32)
        parts = ()
        for part in tl.static_range(PARTS):
            x = tl.load(x_ptr + head * x_head_stride + part * WARP, mask=valid, other=0.0)
            total = tl.fma(to_fp32(x), to_fp32(x), total)
            parts = parts + (x,)  # type: ignore[assignment]  # noqa: RUF005
        rstd = rsqrt(tl.div_rn(_fold_warp(total, STEP), SIZE * 1.0) + eps)[:, None]
        for part in tl.static_range(PARTS // 2):
            x0 = round_bf16(to_fp32(parts[part]) * rstd * weights[part][0])
            x1 = round_bf16(to_fp32(parts[part + PARTS // 2]) * rstd * weights[part][1])
            first = tl.fma(rotations[part][0], x0, rotations[part][1] * x1)
            second = tl.fma(rotations[part][2], x0, rotations[part][3] * x1)
            tl.store(out_ptr + head * SIZE + part * WARP, to_bf16(first), mask=valid)
            tl.store(out_ptr + head * SIZE + SIZE // 2 + part * WARP, to_bf16(second), mask=valid)


@triton.jit
def _fold_warp(total, ROWS: tl.constexpr):
    """Adds 32 lanes up by halves: [ROWS, WARP] -> [ROWS]."""
    v = tl.reshape(total, (ROWS, 2, 2, 2, 2, 2))
    v = tl.sum(v, axis=1)  # lanes 16 apart
    v = tl.sum(v, axis=1)
    v = tl.sum(v, axis=1)
    v = tl.sum(v, axis=1)
    return tl.sum(v, axis=1)  # neighbours


def launch_rms_norm_rope(x: torch.Tensor, weight: torch.Tensor, freqs: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm_rope` without its checks, for callers that have made them."""
    batch, tokens, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        _rms_norm_rope_kernel,
        batch * tokens,
        x,
        x,
        weight,
        freqs,
        out,
        tokens,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        freqs.stride(0) if freqs.shape[0] > 1 else 0,
        eps,
        SIZE=size,
        HEADS=heads,
        STEP=STEP,
        num_warps=1,
    )
    return out


def rms_norm_rope(x: torch.Tensor, weight: torch.Tensor, freqs: torch.Tensor, eps: float) -> torch.Tensor:
    """n = bf16(RMSNorm(x; weight, eps)), then bf16(f00 * n0 + f01 * n1) beside bf16(f10 * n0 + f11 * n1).

    Args:
        x: [B, T, heads, size] bf16, queries or keys; all strides but the last are free, size a power of two from 64 on.
        weight: [size] bf16.
        freqs: [1 or B, T, 1, size / 2, 2, 2] float32, a rotation for each pair (i, i + size / 2).
        eps: added to the mean square.

    Returns:
        bf16, contiguous, shaped like `x`; byte-equal on CUDA to `comfy_kitchen.rms_rope_split_half` (0.2.31).

    Raises:
        KernelDeclined: the arguments are outside the above; the message says which and why.
    """
    if reason := decline(x, weight, freqs, eps):
        raise KernelDeclined(reason)
    return launch_rms_norm_rope(x, weight, freqs, eps)


@torch.library.custom_op("ideogram4_fusion::rms_norm_rope", mutates_args=())
def rms_norm_rope_op(x: torch.Tensor, weight: torch.Tensor, freqs: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm_rope` as an operator that torch.compile keeps whole."""
    return rms_norm_rope(x, weight, freqs, eps)


@rms_norm_rope_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, freqs: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
