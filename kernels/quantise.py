"""bf16 -> fp8 with scale 1: what ComfyUI's fp8 Linear does to its input, where no other kernel wrote it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .errors import KernelDeclined
from .launch import Launch
from .numerics import store_rounded, to_fp32
from .rows import decline_out_dtype, decline_tensor, interpreted

FP8_MAX = 448.0  # torch.finfo(torch.float8_e4m3fn).max
BLOCK = 1 << 18 if interpreted() else 2048


def quantise_reference(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """`x` [...] bf16 as `dtype`: itself as bfloat16, clamped to +-448 and converted as float8_e4m3fn."""
    return x if dtype == x.dtype else x.clamp(-FP8_MAX, FP8_MAX).to(dtype)


def decline(x: torch.Tensor) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    if not x.is_contiguous():
        return "what is to be quantised is not contiguous"
    return decline_tensor("what is to be quantised", x) or decline_out_dtype(torch.float8_e4m3fn, x)


@triton.jit
def _quantise_kernel(x_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    store_rounded(out_ptr + offsets, to_fp32(tl.load(x_ptr + offsets, mask=inside, other=0.0)), inside)


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


@torch.library.custom_op("ideogram4_fusion::quantise", mutates_args=())
def quantise_op(x: torch.Tensor) -> torch.Tensor:
    """`quantise` as an operator that torch.compile keeps whole."""
    return quantise(x)


@quantise_op.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float8_e4m3fn)
