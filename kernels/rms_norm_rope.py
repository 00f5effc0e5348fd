"""RMSNorm and rotary embedding of queries and keys as comfy-kitchen's CUDA kernel `rms_rope_split_half` rounds them.

Found by comparing 2e7 of its values with every plausible order (comfy-kitchen 0.2.31 on an H200, none differs): a warp
adds up one head, lane l the squares of l, l + 32, l + 64, ... one after another, and folds its lanes by halves. The
norm is rounded to bf16. The rotation is fp32: c * x0 is added to the rounded product s * x1 in one multiply-add, and
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .errors import KernelDeclined
from .launch import Launch
from .numerics import round_bf16, rsqrt, to_bf16, to_fp32
from .rows import decline_tensor

WARP = tl.constexpr(32)

# A program is one warp: it reads a token's rotations into registers and goes through six of its query heads and the
# same six key heads, two at a time. 50 us for 4352 tokens of 18 heads on an H200, where queries and keys apart took
# 60, all 18 heads in one program 55, and more warps a program up to 620.
HEADS_PER_PROGRAM, STEP = 6, 2


def rms_norm_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    freqs: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in PyTorch operations, the squares added in the kernel's order."""
    return _reference(q, q_weight, freqs, eps), _reference(k, k_weight, freqs, eps)


def _reference(x: torch.Tensor, weight: torch.Tensor, freqs: torch.Tensor, eps: float) -> torch.Tensor:
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


def decline(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    freqs: torch.Tensor,
    eps: float,
) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    if q.ndim != 4 or q.shape[-1] % 64 or q.shape[-1] & (q.shape[-1] - 1):
        return f"q {list(q.shape)} is not [batch, tokens, heads, a power of two from 64 on]"
    if q.shape != k.shape or q.device != k.device:
        return f"q {list(q.shape)} and k {list(k.shape)} differ"
    batch, tokens, _, size = q.shape
    if freqs.shape[1:] != (tokens, 1, size // 2, 2, 2) or freqs.shape[0] not in (1, batch):
        return f"the rotations {list(freqs.shape)} do not fit q {list(q.shape)}"
    if freqs.dtype != torch.float32 or not freqs.select(0, 0).is_contiguous() or freqs.device != q.device:
        return "the rotations are not contiguous float32 beside q"
    for weight in (q_weight, k_weight):
        if weight.shape != (size,) or weight.device != q.device:
            return f"the norm weight {list(weight.shape)} does not fit a head of {size}"
        if reason := decline_tensor("the norm weight", weight):
            return reason
    return decline_tensor("q", q) or decline_tensor("k", k)


def inexact_rotation(device: torch.device) -> str | None:
    """Why the kernel is not comfy-kitchen's to the last bit on a device, or None."""
    return None if device.type == "cuda" else f"comfy-kitchen rounds otherwise on the {device.type.upper()}"


@triton.jit
def _rms_norm_rope_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    freqs_ptr,
    q_out_ptr,
    k_out_ptr,
    tokens,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    freqs_batch_stride,
    eps,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    STEP: tl.constexpr,
):
    GROUPS: tl.constexpr = (HEADS + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    program = tl.program_id(0).to(tl.int64)
    row, first_head = program // GROUPS, (program % GROUPS) * HEADS_PER_PROGRAM
    batch, token = row // tokens, row % tokens
    lane = tl.arange(0, WARP)[None, :]
    freqs_ptr += batch * freqs_batch_stride + token * (2 * SIZE)
    out = row * (HEADS * SIZE) + lane

    rotations = ()
    for part in tl.static_range(SIZE // WARP // 2):
        quads = lane[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        rotation = tl.reshape(tl.load(freqs_ptr + part * (4 * WARP) + quads), (1, WARP, 2, 2))
        f00_f10, f01_f11 = tl.split(rotation)
        f00, f10 = tl.split(f00_f10)
        f01, f11 = tl.split(f01_f11)
        rotations = rotations + ((f00, f01, f10, f11),)  # type: ignore[assignment]  # noqa: RUF005

    q_ptr += batch * q_batch_stride + token * q_token_stride + lane
    k_ptr += batch * k_batch_stride + token * k_token_stride + lane
    _rotate_heads(
        q_ptr, q_weight_ptr, q_out_ptr + out, q_head_stride, rotations, first_head, eps,
        SIZE, HEADS, HEADS_PER_PROGRAM, STEP,
    )  # fmt: skip
    _rotate_heads(
        k_ptr, k_weight_ptr, k_out_ptr + out, k_head_stride, rotations, first_head, eps,
        SIZE, HEADS, HEADS_PER_PROGRAM, STEP,
    )  # fmt: skip


@triton.jit
def _rotate_heads(
    x_ptr,
    weight_ptr,
    out_ptr,
    head_stride,
    rotations,
    first_head,
    eps,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    STEP: tl.constexpr,
):
    """Norms and rotates HEADS_PER_PROGRAM heads of one token; the pointers are those of the lanes, [1, WARP]."""
    PARTS: tl.constexpr = SIZE // WARP
    lane = tl.arange(0, WARP)[None, :]
    weights = ()
    for part in tl.static_range(PARTS // 2):
        w0 = to_fp32(tl.load(weight_ptr + part * WARP + lane))
        w1 = to_fp32(tl.load(weight_ptr + SIZE // 2 + part * WARP + lane))
        weights = weights + ((w0, w1),)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no starred tuples

    for start in tl.static_range(0, HEADS_PER_PROGRAM, STEP):
        head = first_head + start + tl.arange(0, STEP)[:, None]
        valid = head < HEADS
        total = tl.zeros([STEP, WARP], dtype=tl.float32)
        parts = ()
        for part in tl.static_range(PARTS):
            x = tl.load(x_ptr + head * head_stride + part * WARP, mask=valid, other=0.0)
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


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    freqs: torch.Tensor,
    eps: float,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Checks arguments; what it returns is `rms_norm_rope` for arguments of their form, without checks."""
    if reason := decline(q, k, q_weight, k_weight, freqs, eps):
        raise KernelDeclined(reason)
    batch, tokens, heads, size = q.shape
    programs = batch * tokens * triton.cdiv(heads, HEADS_PER_PROGRAM)
    strides = (*q.stride()[:3], *k.stride()[:3], freqs.stride(0) if freqs.shape[0] > 1 else 0)
    constants = size, heads, HEADS_PER_PROGRAM, STEP
    launch = Launch(_rms_norm_rope_kernel, programs, q.device, constants, num_warps=1)

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        freqs: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
        k_out = torch.empty_like(q_out)
        launch(q, k, q_weight, k_weight, freqs, q_out, k_out, tokens, *strides, eps)
        return q_out, k_out

    return run


def rms_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    freqs: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """n = bf16(RMSNorm(x; weight, eps)), then bf16(f00 * n0 + f01 * n1) beside bf16(f10 * n0 + f11 * n1), x = q and k.

    Args:
        q: [B, T, heads, size] bf16; all strides but the last are free, size a power of two from 64 on.
        k: like `q`, with strides of its own.
        q_weight: [size] bf16.
        k_weight: [size] bf16.
        freqs: [1 or B, T, 1, size / 2, 2, 2] float32, a rotation for each pair (i, i + size / 2).
        eps: added to the mean square.

    Returns:
        Two of bf16, contiguous, shaped like `q`; byte-equal on CUDA to `comfy_kitchen.rms_rope_split_half` (0.2.31).

    Raises:
        KernelDeclined: the arguments are outside the above; the message says which and why.
    """
    arguments = (q, k, q_weight, k_weight, freqs, eps)
    return prepare(*arguments)(*arguments)


@torch.library.custom_op("ideogram4_fusion::rms_norm_rope", mutates_args=())
def rms_norm_rope_op(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    freqs: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_rope` as an operator that torch.compile keeps whole."""
    return rms_norm_rope(q, k, q_weight, k_weight, freqs, eps)


@rms_norm_rope_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    freqs: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))  # type: ignore[return-value]
