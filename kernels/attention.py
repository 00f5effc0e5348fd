"""Which of PyTorch's attention backends is fastest where, and that backend by itself.

cuDNN's is PyTorch's, not ours; it has no place in a proof of equality, since it adds up in another order than
FlashAttention-2. Both are as far from attention in fp64: relative error 2.3e-3 at 4352 tokens of random bf16 values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from .errors import KernelDeclined


@dataclass(frozen=True)
class Faster:
    """Where cuDNN's attention is taken in place of FlashAttention-2, without a mask.

    Attributes:
        capability: compute capability of the GPU.
        head_dim: size of a head.
        measured_us: tokens -> microseconds of FlashAttention-2 and of cuDNN, for 18 heads of one image in bf16.
        on: the GPU and PyTorch measured with.
    """

    capability: tuple[int, int]
    head_dim: int
    measured_us: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    on: str = ""


# GPUs that are not listed keep what the host chose. Ideogram 4 has heads of 256, and PyTorch gives cuDNN more than 128
# (`check_cudnn_tensor_shapes` in ATen's sdp_utils.cpp) on Hopper alone, later versions on Blackwell's 10.x too, not on
# Ada (8.9) or Blackwell's 12.0. 10.x is unmeasured.
TABLE = (
    Faster(
        capability=(9, 0),
        head_dim=256,
        measured_us={512: (46, 22), 1280: (117, 71), 4352: (1128, 501), 16640: (15813, 7597)},
        on="H200, PyTorch 2.11",
    ),
)


def cudnn_is_faster(capability: tuple[int, int], head_dim: int) -> bool:
    """Whether the table says so."""
    return any((entry.capability, entry.head_dim) == (capability, head_dim) for entry in TABLE)


def attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(size)) v in fp64, [B, heads, T, size]."""
    q, k, v = q.double(), k.double(), v.double()
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1) @ v


def cudnn_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention without a mask by cuDNN.

    Called as PyTorch's own dispatch calls it: the context manager that chooses a backend (`sdpa_kernel`) sets flags of
    the whole process, and where threads of several GPUs leave it in another order, none of the backends stays on.

    Args:
        q: [B, heads, T, size], bf16 or fp16, on a GPU.
        k: like `q`.
        v: like `q`.

    Returns:
        [B, heads, T, size]; the same bytes for the same arguments.

    Raises:
        KernelDeclined: cuDNN does not take these arguments, or was turned off in this process.
        RuntimeError: cuDNN took the arguments, and then failed.
    """
    if not torch.backends.cuda.cudnn_sdp_enabled():
        raise KernelDeclined("cuDNN's attention is turned off in this process")
    if not can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, False, False)):
        kind = str(q.dtype).removeprefix("torch.")
        raise KernelDeclined(f"cuDNN does not take heads of {q.shape[-1]} in {kind} here")
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0]
    return out
