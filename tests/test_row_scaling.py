"""Rows that are scaled as they are written: every kernel against its reference, byte for byte."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from ideogram4_fusion.kernels import quantise, rms_norm_gate_modulate, rms_norm_modulate, silu_mul
from ideogram4_fusion.kernels.errors import KernelDeclined
from ideogram4_fusion.kernels.row_scaling import scale_rows_reference

FP8 = torch.float8_e4m3fn
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
EPS = 1e-5
SHAPES = [(1, 37, 4608), (2, 65, 516), (1, 1, 4), (2, 1283, 4608), (1, 5, 8192)]

fp8_hardware = pytest.mark.skipif(not HAS_FP8, reason="no fp8 hardware")


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(math.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(math.nan))
    yield


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    rows = torch.randn(shape, generator=generator)
    # Rows of very different size, and one of zeros.
    sizes = torch.logspace(-6, 6, shape[-2] if len(shape) > 1 else 1)[:, None]
    sizes[-1] = sizes[-1] * (len(sizes) == 1)
    return (rows * scale * (sizes if len(shape) > 1 else 1)).bfloat16().to("cuda" if HAS_FP8 else "cpu")


def assert_equal(ours: tuple[torch.Tensor, ...], reference: tuple[torch.Tensor, ...]) -> None:
    for mine, theirs in zip(ours, reference, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert torch.equal(mine.view(torch.uint8), theirs.contiguous().view(torch.uint8))


@fp8_hardware
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_modulate(shape: tuple[int, int, int]) -> None:
    scale, *_ = random(shape[0], 1, 4 * shape[2], seed=7).chunk(4, dim=-1)
    args = (random(*shape), random(shape[2]), scale, EPS)
    reference = rms_norm_modulate.rms_norm_modulate_reference(*args, FP8, True)
    assert_equal(rms_norm_modulate.rms_norm_modulate_rows(*args), reference)


@fp8_hardware
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate_modulate(shape: tuple[int, int, int]) -> None:
    hidden = shape[2]
    scale, gate, *_ = random(shape[0], 1, 4 * hidden, seed=7).chunk(4, dim=-1)
    x, branch = random(*shape), random(*shape, seed=1)
    args = (x, branch, random(hidden), gate, random(hidden, seed=2), scale, EPS, 2 * EPS)
    reference = rms_norm_gate_modulate.rms_norm_gate_modulate_reference(*args, FP8, True)
    assert_equal(rms_norm_gate_modulate.rms_norm_gate_modulate_rows(*args), reference)


@fp8_hardware
@pytest.mark.parametrize("shape", [(1, 3, 12288), (2, 1283, 12288), (3, 5, 260), (7, 1), (1, 2, 16384)], ids=str)
def test_silu_mul_and_quantise(shape: tuple[int, ...]) -> None:
    a, b = random(*shape), random(*shape, seed=1)
    assert_equal(silu_mul.silu_mul_rows(a, b), silu_mul.silu_mul_reference(a, b, FP8, True))
    assert_equal(quantise.quantise_rows(a), scale_rows_reference(a))


@fp8_hardware
def test_rows_with_gaps() -> None:
    wide = random(2, 40, 3 * 512)
    args = (wide[:, 3:36, 512:1024], random(512), random(2, 1, 512), EPS)
    reference = rms_norm_modulate.rms_norm_modulate_reference(*args, FP8, True)
    assert_equal(rms_norm_modulate.rms_norm_modulate_rows(*args), reference)


def test_what_rows_are_not_taken() -> None:
    with pytest.raises(KernelDeclined):
        quantise.quantise_rows(random(2, 16388))
    with pytest.raises(KernelDeclined):
        silu_mul.silu_mul_rows(random(2, 64)[:, ::2], random(2, 32))


def test_a_row_meets_the_largest_fp8_value_and_comes_back_close() -> None:
    x = random(9, 1000)
    rows, scales = scale_rows_reference(x)
    back = rows.float() * scales[:, None]
    zeros = x.abs().amax(dim=-1) == 0
    assert int(zeros.sum()) == 1 and bool((back[zeros] == 0).all())
    assert bool((rows.float().abs().amax(dim=-1)[~zeros] == 448).all())
    # Four bits of significand, or the step of the subnormal numbers: 2^-9 of the row's scale.
    bound = torch.maximum(x.float().abs() * 2**-4, scales[:, None] * 2**-10)
    assert bool(((back - x.float()).abs() <= bound * 1.001).all())
