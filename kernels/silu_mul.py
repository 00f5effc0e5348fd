"""silu(a) * b: the middle of the SwiGLU feed-forward w2(silu(w1 x) * w3 x)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .errors import KernelDeclined
from .launch import Launch
from .numerics import round_bf16, silu, store_rounded, to_fp32
from .quantise import quantise_reference
from .rows import decline_out_dtype, decline_tensor, interpreted

# 2048 elements at 4 warps: 80 us for 4352 tokens on an H200, where 8 warps took 88, and 1024 elements 86.
# The interpreter pays per program.
BLOCK = 1 << 18 if interpreted() else 2048


def silu_mul_reference(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The chain as both hosts write it: silu is rounded to bf16, then the product."""
    return quantise_reference(F.silu(a) * b, out_dtype)


def decline(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    if a.shape != b.shape or a.device != b.device:
        return f"a {list(a.shape)} on {a.device} and b {list(b.shape)} on {b.device} differ"
    if not (a.is_contiguous() and b.is_contiguous()):
        return "a or b is not contiguous"
    return decline_tensor("a", a) or decline_tensor("b", b) or decline_out_dtype(out_dtype, a)


@triton.jit
def _silu_mul_kernel(a_ptr, b_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    a = to_fp32(tl.load(a_ptr + offsets, mask=inside, other=0.0))
    b = to_fp32(tl.load(b_ptr + offsets, mask=inside, other=0.0))
    store_rounded(out_ptr + offsets, round_bf16(silu(a)) * b, inside)


def prepare(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Callable[..., torch.Tensor]:
    """Checks arguments; what it returns is `silu_mul` for arguments of their form, without checks."""
    if reason := decline(a, b, out_dtype):
        raise KernelDeclined(reason)
    elements = a.numel()
    launch = Launch(_silu_mul_kernel, triton.cdiv(elements, BLOCK), a.device, (BLOCK,), num_warps=4)

    def run(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = out_dtype) -> torch.Tensor:
        out = torch.empty_like(a, dtype=dtype)
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
    return prepare(a, b, out_dtype)(a, b)


@torch.library.custom_op("ideogram4_fusion::silu_mul", mutates_args=())
def silu_mul_op(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`silu_mul` as an operator that torch.compile keeps whole."""
    return silu_mul(a, b, out_dtype)


@silu_mul_op.register_fake
def _(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty_like(a, dtype=out_dtype)
