"""Every kernel against its plain reference: byte equality on a GPU, in Triton's interpreter at most 1 ulp in 10^4.

The interpreter allowance is for the norms alone: there the reference runs on the CPU, which adds a row up in another
order than ATen's CUDA kernel, whose order ours repeats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ideogram4_fusion.kernels import (
    numerics,
    quantise,
    rms_norm_gate,
    rms_norm_gate_modulate,
    rms_norm_modulate,
    rms_norm_rope,
    rotate_half_rope,
    silu_mul,
)
from ideogram4_fusion.kernels.errors import KernelDeclined

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
EPS = 1e-5

FP8 = torch.float8_e4m3fn
OUT_DTYPES = [torch.bfloat16] + ([FP8] if ON_GPU and torch.cuda.get_device_capability() >= (8, 9) else [])

# (batch, tokens, hidden): the model's size, one past a tile, one short of one, a few elements, batches with odd tokens.
SHAPES = [(1, 37, 4608), (2, 65, 516), (3, 33, 508), (1, 1, 4), (2, 7, 128), (1, 5, 8192)]
if ON_GPU:
    SHAPES += [(1, 4352, 4608), (2, 1283, 4608), (1, 512, 4608), (3, 4097, 1536)]


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fills every fresh tensor of the launchers with NaN, so that an element nobody wrote cannot pass for a result."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
    yield


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).bfloat16().to(DEVICE)


def modulation(batch: int, tokens: int, hidden: int) -> tuple[torch.Tensor, ...]:
    """The four strided quarters of a modulation, as a block's chunk gives them."""
    return random(batch, tokens, 4 * hidden, seed=7).chunk(4, dim=-1)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.uint8).int()


def assert_equal(ours: torch.Tensor, reference: torch.Tensor, summed: bool = False) -> None:
    """Byte equality. `summed`: the interpreter may be one ulp off in 1 of 10^4 values, for a row's sum."""
    assert ours.shape == reference.shape and ours.dtype == reference.dtype
    steps = (bits(ours) - bits(reference)).abs()
    unequal = int((steps != 0).sum())
    if summed and not ON_GPU:
        assert int(steps.max()) <= 1
        assert unequal <= math.ceil(ours.numel() / 10_000)
    else:
        assert unequal == 0, f"{unequal} of {ours.numel()} values differ, by up to {int(steps.max())} ulp"


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_modulate(shape: tuple[int, int, int], out_dtype: torch.dtype) -> None:
    batch, _, hidden = shape
    x, weight = random(*shape, scale=3.0), random(hidden)
    scale = modulation(batch, 1, hidden)[2]
    args = (x, weight, scale, EPS, out_dtype)
    assert_equal(
        rms_norm_modulate.rms_norm_modulate(*args), rms_norm_modulate.rms_norm_modulate_reference(*args), summed=True
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate(shape: tuple[int, int, int]) -> None:
    batch, _, hidden = shape
    x, branch, weight = random(*shape, scale=3.0), random(*shape, scale=2.0, seed=1), random(hidden)
    gate = modulation(batch, 1, hidden)[1]
    args = (x, branch, weight, gate, EPS)
    assert_equal(rms_norm_gate.rms_norm_gate(*args), rms_norm_gate.rms_norm_gate_reference(*args), summed=True)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate_modulate(shape: tuple[int, int, int], out_dtype: torch.dtype) -> None:
    batch, _, hidden = shape
    x, branch, weight = random(*shape, scale=3.0), random(*shape, scale=2.0, seed=1), random(hidden)
    _, gate, scale, _ = modulation(batch, 1, hidden)
    args = (x, branch, weight, gate, random(hidden, seed=2), scale, EPS, 2 * EPS, out_dtype)
    ours = rms_norm_gate_modulate.rms_norm_gate_modulate(*args)
    reference = rms_norm_gate_modulate.rms_norm_gate_modulate_reference(*args)
    for mine, theirs in zip(ours, reference, strict=True):
        assert_equal(mine, theirs, summed=True)


@pytest.mark.skipif(FP8 not in OUT_DTYPES, reason="no fp8 hardware")
def test_fp8_of_every_finite_bf16_value() -> None:
    """Every value as the product of silu's own fixed point of large numbers, 256, and a 256th of it."""
    every = every_bf16()
    every = every[every.isfinite()]
    args = (torch.full_like(every, 256.0), every / 256)
    products = silu_mul.silu_mul(*args)
    assert int((bits(products) != bits(every)).sum()) < 5000  # the subnormals among the 256ths lose bits
    assert_equal(silu_mul.silu_mul(*args, FP8), silu_mul.silu_mul_reference(*args, FP8))


@pytest.mark.skipif(FP8 not in OUT_DTYPES, reason="no fp8 hardware")
@pytest.mark.parametrize("size", [1, 2049, 4352 * 4608])
def test_quantise(size: int) -> None:
    x = random(size, scale=300.0)
    assert_equal(quantise.quantise(x), quantise.quantise_reference(x))


@pytest.mark.skipif(FP8 not in OUT_DTYPES, reason="no fp8 hardware")
def test_quantise_of_every_bf16_value_but_nan() -> None:
    every = every_bf16()
    every = every[~every.isnan()]
    assert_equal(quantise.quantise(every), quantise.quantise_reference(every))


@pytest.mark.parametrize("which", ["one for all", "one an image", "one a token"])
def test_broadcast_of_the_modulation(which: str) -> None:
    batch, tokens, hidden = 3, 17, 256
    rows = {"one for all": (1, 1), "one an image": (batch, 1), "one a token": (batch, tokens)}[which]
    _, gate, scale, _ = modulation(*rows, hidden)
    x, branch, weight = random(batch, tokens, hidden), random(batch, tokens, hidden, seed=1), random(hidden)
    first, second = (x, weight, scale, EPS), (x, branch, weight, gate, EPS)
    assert_equal(
        rms_norm_modulate.rms_norm_modulate(*first), rms_norm_modulate.rms_norm_modulate_reference(*first), summed=True
    )
    assert_equal(rms_norm_gate.rms_norm_gate(*second), rms_norm_gate.rms_norm_gate_reference(*second), summed=True)


def test_rows_with_gaps() -> None:
    """Slices of a longer sequence and of a wider tensor: free strides over batch and tokens."""
    wide = random(2, 40, 3 * 512)
    x, branch = wide[:, 3:36, 512:1024], wide[:, 3:36, :512]
    weight, (scale, gate, *_) = random(512), modulation(2, 1, 512)
    assert not x.is_contiguous()
    first, second = (x, weight, scale, EPS), (x, branch, weight, gate, EPS)
    assert_equal(
        rms_norm_modulate.rms_norm_modulate(*first), rms_norm_modulate.rms_norm_modulate_reference(*first), summed=True
    )
    assert_equal(rms_norm_gate.rms_norm_gate(*second), rms_norm_gate.rms_norm_gate_reference(*second), summed=True)


def every_bf16() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(DEVICE)


def test_silu_of_every_bf16_value() -> None:
    a = every_bf16()
    ours, reference = silu_mul.silu_mul(a, torch.ones_like(a)), silu_mul.silu_mul_reference(a, torch.ones_like(a))
    both_nan = ours.isnan() & reference.isnan()
    assert int(both_nan.sum()) < 300  # the NaN inputs, and minus infinity
    assert_equal(ours[~both_nan], reference[~both_nan])


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1237), (2, 5, 12288), (1, 257, 1024)], ids=str)
def test_silu_mul(shape: tuple[int, ...], out_dtype: torch.dtype) -> None:
    args = (random(*shape, scale=30.0), random(*shape, scale=30.0, seed=1), out_dtype)
    assert_equal(silu_mul.silu_mul(*args), silu_mul.silu_mul_reference(*args))


@pytest.mark.parametrize("shape", [(1, 33, 18, 256), (2, 17, 4, 32), (3, 5, 3, 6)], ids=str)
@pytest.mark.parametrize("tables", [1, None], ids=["shared tables", "tables an image"])
def test_rope(shape: tuple[int, int, int, int], tables: int | None) -> None:
    """q read strided out of a qkv tensor."""
    batch, tokens, heads, size = shape
    x = random(batch, tokens, 3, heads, size).unbind(dim=2)[1]
    cos, sin = random(tables or batch, tokens, size, seed=1), random(tables or batch, tokens, size, seed=2)
    args = (x, cos, sin)
    assert_equal(rotate_half_rope.rotate_half_rope(*args), rotate_half_rope.rotate_half_rope_reference(*args))


def rotations(batch: int, tokens: int, size: int) -> torch.Tensor:
    """2 x 2 rotations as ComfyUI's Ideogram 4 hands them to comfy-kitchen."""
    generator = torch.Generator().manual_seed(3)
    angle = torch.rand(batch, tokens, 1, size // 2, generator=generator) * 100
    matrix = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), dim=-1)
    return matrix.unflatten(-1, (2, 2)).to(DEVICE)


@pytest.mark.parametrize("shape", [(1, 33, 18, 256), (2, 17, 4, 64), (3, 5, 7, 128)], ids=str)
@pytest.mark.parametrize("tables", [1, None], ids=["shared tables", "tables an image"])
def test_norm_rope(shape: tuple[int, int, int, int], tables: int | None) -> None:
    batch, tokens, heads, size = shape
    q, k, _ = random(batch, tokens, 3, heads, size, scale=2.0).unbind(dim=2)
    args = (q, k, random(size), random(size, seed=1), rotations(tables or batch, tokens, size), EPS)
    ours, reference = rms_norm_rope.rms_norm_rope(*args), rms_norm_rope.rms_norm_rope_reference(*args)
    # The interpreter's multiply-add rounds twice, and its rsqrt is another than PyTorch's: both move a rounding now
    # and then.
    for mine, theirs in zip(ours, reference, strict=True):
        assert_equal(mine, theirs, summed=True)


def test_rounding_ties_and_edges_in_the_kernels_own_way() -> None:
    """Products that fall half way between two bf16 values, and ones that leave its range on both sides."""
    a = torch.tensor([1.0, 3.0, 1e38, -3e38, 1e-38, 9e-41], device=DEVICE).bfloat16().repeat(1024)
    b = (1.0 + torch.arange(6 * 1024, device=DEVICE) / 128).bfloat16()
    assert_equal(silu_mul.silu_mul(a, b), silu_mul.silu_mul_reference(a, b))


def test_empty_input() -> None:
    x = random(1, 0, 512)
    assert rms_norm_modulate.rms_norm_modulate(x, random(512), random(1, 1, 512), EPS).shape == (1, 0, 512)
    assert silu_mul.silu_mul(x, x).shape == (1, 0, 512)


@pytest.mark.parametrize(
    ("reason", "x", "weight", "scale"),
    [
        ("x is float32", (1, 4, 512, torch.float32), (512,), (1, 1, 512)),
        ("x has 2 dimensions", (4, 512), (512,), (1, 1, 512)),
        ("hidden size 510 is not a multiple of 4", (1, 4, 510), (510,), (1, 1, 510)),
        ("hidden size 8196 is larger than 8192", (1, 4, 8196), (8196,), (1, 1, 8196)),
        ("the norm weight [256] does not fit", (1, 4, 512), (256,), (1, 1, 512)),
        ("the norm weight is float32", (1, 4, 512), (512, torch.float32), (1, 1, 512)),
        ("scale [2, 1, 512] does not broadcast", (3, 4, 512), (512,), (2, 1, 512)),
        ("scale [1, 3, 512] does not broadcast", (1, 4, 512), (512,), (1, 3, 512)),
        ("scale has its last", (1, 4, 512), (512,), None),
    ],
)
def test_declined_with_a_reason(
    reason: str, x: tuple[object, ...], weight: tuple[object, ...], scale: tuple[object, ...] | None
) -> None:
    def make(shape: tuple[object, ...]) -> torch.Tensor:
        sizes = [s for s in shape if isinstance(s, int)]
        dtype = shape[-1] if isinstance(shape[-1], torch.dtype) else torch.bfloat16
        return torch.ones(sizes, dtype=dtype, device=DEVICE)

    strided = random(1, 1, 1024)[..., ::2]
    with pytest.raises(KernelDeclined) as error:
        rms_norm_modulate.rms_norm_modulate(make(x), make(weight), strided if scale is None else make(scale), EPS)
    assert ("the last dimension of scale is strided" if scale is None else reason) in str(error.value)


def test_mismatched_operands_are_declined() -> None:
    with pytest.raises(KernelDeclined, match="differ"):
        silu_mul.silu_mul(random(4, 8), random(4, 4))
    with pytest.raises(KernelDeclined, match="no dimensions"):
        silu_mul.silu_mul(random(1)[0], random(1)[0])
    with pytest.raises(KernelDeclined, match="not float16"):
        silu_mul.silu_mul(random(4, 8), random(4, 8), torch.float16)
    if FP8 not in OUT_DTYPES:
        with pytest.raises(KernelDeclined, match=r"capability 8\.9"):
            silu_mul.silu_mul(random(4, 8), random(4, 8), FP8)
        with pytest.raises(KernelDeclined, match=r"capability 8\.9"):
            quantise.quantise(random(4, 8))
    with pytest.raises(KernelDeclined, match="not contiguous"):
        silu_mul.silu_mul(random(4, 8)[:, :4], random(4, 4))
    with pytest.raises(KernelDeclined, match="not contiguous"):
        quantise.quantise(random(4, 8)[:, :4])
    with pytest.raises(KernelDeclined, match=r"residual .* and the branch"):
        rms_norm_gate.rms_norm_gate(random(1, 4, 8), random(1, 5, 8), random(8), random(1, 1, 8), EPS)
    with pytest.raises(KernelDeclined, match="does not fit"):
        rotate_half_rope.rotate_half_rope(random(1, 4, 2, 8), random(1, 5, 8), random(1, 5, 8))


KERNELS = {
    "rms_norm_modulate": rms_norm_modulate,
    "rms_norm_gate": rms_norm_gate,
    "rms_norm_gate_modulate": rms_norm_gate_modulate,
    "rms_norm_rope": rms_norm_rope,
    "silu_mul": silu_mul,
    "rotate_half_rope": rotate_half_rope,
}
if FP8 in OUT_DTYPES:
    KERNELS["quantise"] = quantise


@pytest.mark.parametrize("name", KERNELS)
def test_custom_op_matches_the_launcher_and_its_fake(name: str) -> None:
    x, weight, m = random(2, 5, 64), random(64), random(2, 1, 64)
    arguments = {
        "rms_norm_modulate": (x, weight, m, EPS),
        "rms_norm_gate": (x, x, weight, m, EPS),
        "rms_norm_gate_modulate": (x, x, weight, m, weight, m, EPS, EPS),
        "rms_norm_rope": (*[x.reshape(2, 5, 1, 64)] * 2, weight, weight, rotations(2, 5, 64), EPS),
        "silu_mul": (x, x),
        "quantise": (x,),
        "rotate_half_rope": (x.view(2, 5, 4, 16), random(2, 5, 16), random(2, 5, 16, seed=1)),
    }[name]
    op = getattr(torch.ops.ideogram4_fusion, name)
    through_op, direct = op(*arguments), getattr(KERNELS[name], name)(*arguments)
    for a, b in zip(*((o if isinstance(o, tuple) else (o,)) for o in (through_op, direct)), strict=True):
        assert_equal(a, b)
    torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(ON_GPU, reason="the GPU has its own cast")
def test_the_interpreters_cast_is_torchs() -> None:
    """The integer rounding over random bit patterns: every exponent, subnormals, infinities and NaN among them."""
    import triton
    import triton.language as tl

    @triton.jit
    def cast(x_ptr: Any, out_ptr: Any, N: tl.constexpr) -> None:
        offsets = tl.arange(0, N)
        tl.store(out_ptr + offsets, numerics.to_bf16(tl.load(x_ptr + offsets)))

    x = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 16,), dtype=torch.int32).view(torch.float32)
    out = torch.full((1 << 16,), math.nan, dtype=torch.bfloat16)
    cast[(1,)](x, out, 1 << 16)
    assert torch.equal(out.isnan(), x.isnan())
    assert_equal(out[~x.isnan()], x[~x.isnan()].bfloat16())
