"""The chains at the model's sizes: kernel and eager form, random arguments, and the bytes that they must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels import (
    quantise,
    rms_norm_gate,
    rms_norm_gate_modulate,
    rms_norm_modulate,
    rms_norm_rope,
    rotate_half_rope,
    silu_mul,
)
from ..kernels.launch import Prepared
from ..kernels.row_scaling import scale_rows_reference

HIDDEN, HEADS, HEAD, INNER = 4608, 18, 256, 12288
EPS = 1e-5
FP8 = torch.float8_e4m3fn
BY_ROWS = " by rows"  # each row scaled to fp8's range


@dataclass(frozen=True)
class Workload:
    """A chain at a size.

    Attributes:
        chain: as in a status line, with `q, k` where both are one call.
        fused: its kernel.
        eager: its reference; both take `arguments`.
        moved: bytes read and written at least.
        dtype_out: of the result.
    """

    chain: str
    fused: Callable[..., Any]
    eager: Callable[..., Any]
    arguments: tuple[Any, ...]
    moved: int
    dtype_out: torch.dtype = torch.bfloat16


def workloads(tokens: int, device: torch.device, seed: int) -> Iterator[Workload]:
    """One workload a chain at `tokens` tokens of one image. The gates' tanh is part of their chains here."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    x, branch, weight = random(1, tokens, HIDDEN), random(1, tokens, HIDDEN), random(HIDDEN)
    scale, gate, *_ = random(1, 1, 4 * HIDDEN).chunk(4, dim=-1)
    a, b = random(1, tokens, INNER), random(1, tokens, INNER)
    row, inner = 2 * tokens * HIDDEN, 2 * tokens * INNER
    merge_kernel, gate_kernel = Prepared(rms_norm_gate_modulate.prepare), Prepared(rms_norm_gate.prepare)

    def merged(x: Any, branch: Any, weight: Any, gate: Any, *rest: Any) -> Any:
        return merge_kernel(x, branch, weight, torch.tanh(gate), *rest)

    def merged_eagerly(x: Any, branch: Any, weight: Any, gate: Any, *rest: Any) -> Any:
        return rms_norm_gate_modulate.rms_norm_gate_modulate_reference(x, branch, weight, torch.tanh(gate), *rest)

    def gated(x: Any, branch: Any, weight: Any, gate: Any, eps: float) -> Any:
        return gate_kernel(x, branch, weight, torch.tanh(gate), eps)

    def gated_eagerly(x: Any, branch: Any, weight: Any, gate: Any, eps: float) -> Any:
        return rms_norm_gate.rms_norm_gate_reference(x, branch, weight, torch.tanh(gate), eps)

    modulate = Prepared(rms_norm_modulate.prepare), rms_norm_modulate.rms_norm_modulate_reference
    silu = Prepared(silu_mul.prepare), silu_mul.silu_mul_reference
    for suffix, form in (("", (torch.bfloat16,)), ("", (FP8,)), (BY_ROWS, (FP8, True))):
        dtype = form[0]
        scales = 4 * tokens if suffix else 0
        written = row * dtype.itemsize // 2 + scales
        yield Workload(f"modulate{suffix}", *modulate, (x, weight, scale, EPS, *form), row + written, dtype)
        merge_arguments = (x, branch, weight, gate, weight, scale, EPS, EPS, *form)
        yield Workload(f"gate+modulate{suffix}", merged, merged_eagerly, merge_arguments, 3 * row + written, dtype)
        halved = inner * dtype.itemsize // 2 + scales
        yield Workload(f"silu-mul{suffix}", *silu, (a, b, *form), 2 * inner + halved, dtype)
    yield Workload("gate", gated, gated_eagerly, (x, branch, weight, gate, EPS), 3 * row)
    yield Workload("quantise", Prepared(quantise.prepare), quantise.quantise_reference, (x,), row + row // 2, FP8)
    by_rows = Prepared(quantise.prepare_by_rows), scale_rows_reference
    yield Workload(f"quantise{BY_ROWS}", *by_rows, (x,), row + row // 2 + 4 * tokens, FP8)
    # Queries and keys lie in the qkv tensor, with gaps.
    queries, keys, _ = random(1, tokens, 3, HEADS, HEAD).unbind(dim=2)
    angle = torch.rand(1, tokens, 1, HEAD // 2, generator=generator, device=device)
    freqs = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), dim=-1).unflatten(-1, (2, 2))
    yield Workload(
        "rms-norm-rope q, k",
        Prepared(rms_norm_rope.prepare),
        rms_norm_rope.rms_norm_rope_reference,
        (queries, keys, random(HEAD), random(HEAD), freqs.contiguous(), EPS),
        4 * row + freqs.numel() * 4,
    )
    yield Workload(
        "rotate-half-rope",
        Prepared(rotate_half_rope.prepare),
        rotate_half_rope.rotate_half_rope_reference,
        (queries, random(1, tokens, HEAD), random(1, tokens, HEAD)),
        2 * row + 2 * 2 * tokens * HEAD,
    )
