"""`high`: its pieces, each by itself, and that a seed gives the same result the first time too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from ideogram4_fusion.fusion.chains import ROWS_INPUT, Chain, load_chains
from ideogram4_fusion.fusion.fusion import Fusion
from ideogram4_fusion.fusion.pieces import ALL, NONE, Pieces
from ideogram4_fusion.fusion.proof import FARTHEST, Count
from ideogram4_fusion.kernels.attention import TABLE, attention_reference, cudnn_attention, cudnn_is_faster
from ideogram4_fusion.kernels.errors import KernelDeclined
from ideogram4_fusion.kernels.row_scaling import scale_rows_reference
from ideogram4_fusion.tests.fp8_stack import Block, make_fp8_fusion, make_fp8_inputs, make_fp8_stack
from ideogram4_fusion.tests.fusing import run
from ideogram4_fusion.tests.quantising import multiply
from ideogram4_fusion.tests.stack import DEVICE, Stack


def products(linear: nn.Module, rows: torch.Tensor, scale: torch.Tensor, fast: bool) -> torch.Tensor:
    """Off by a little where it may be fast, as one that adds up with fewer bits; by rows where they have scales."""
    if scale.ndim:
        return F.linear(rows.to(torch.bfloat16) * scale.bfloat16(), linear.weight)
    return multiply(linear, rows, scale, fast) * (1.01 if fast else 1)


class RowWiseLinear(nn.Linear):
    """Multiplies in bf16, and could in fp8 with scales for each row."""


def by_rows(stack: Stack) -> Stack:
    for layer in stack.layers:
        for parent, names in ((layer.attention, ("qkv", "o")), (layer.feed_forward, ("w1", "w2", "w3"))):
            for name in names:
                plain = getattr(parent, name)
                linear = RowWiseLinear(plain.in_features, plain.out_features, bias=False)
                linear.weight = plain.weight
                setattr(parent, name, linear)
    return stack


def make_high(pieces: Pieces, **kernels: Callable[..., Any]) -> Fusion:
    lossless = make_fp8_fusion(**kernels)
    assert lossless.host.emission is not None
    emission = dataclasses.replace(
        lossless.host.emission, multiply=products, takes_rows=lambda linear: isinstance(linear, RowWiseLinear)
    )
    host = dataclasses.replace(lossless.host, emission=emission)
    chains = {**lossless._chains, ROWS_INPUT: Chain(ROWS_INPUT, scale_rows_reference, scale_rows_reference)}
    return Fusion("high", host, torch.device(DEVICE), chains=chains, pieces=pieces)


@torch.inference_mode()
def forward(stack: Stack, fusion: Fusion, inputs: tuple[Any, ...]) -> torch.Tensor:
    return fusion.run(stack, lambda: stack(*inputs))


def silu_mul_off(a: torch.Tensor, b: torch.Tensor, *out: torch.dtype) -> torch.Tensor:
    product = F.silu(a) * b * 1.01
    return product.clamp(-448, 448).to(out[0]) if out else product


def test_with_nothing_chosen_it_is_lossless() -> None:
    stack, inputs = make_fp8_stack(Block), make_fp8_inputs()
    fusion = make_high(NONE, silu_mul=silu_mul_off)
    for _ in range(2):
        assert torch.equal(forward(stack, fusion, inputs), run(stack, None, inputs))
    assert list(fusion.ledger.refused) == ["silu-mul"]


@pytest.mark.parametrize(
    "pieces",
    [Pieces("stock", True, False, False), Pieces("stock", False, False, True), ALL],
    ids=["fast accumulation", "unproven chains", "all"],
)
def test_a_piece_changes_the_result_and_repeats_it_from_the_first_time_on(pieces: Pieces) -> None:
    stack, inputs = make_fp8_stack(Block), make_fp8_inputs()
    kernels = {"silu_mul": silu_mul_off} if pieces.unproven_chains else {}
    fusion = make_high(pieces, **kernels)
    first = forward(stack, fusion, inputs)
    assert not torch.equal(first, run(stack, None, inputs))
    assert torch.equal(forward(stack, fusion, inputs), first)
    assert torch.equal(forward(stack, make_high(pieces, **kernels), inputs), first)
    assert not fusion.ledger.refused


def test_fast_accumulation_is_not_laid_at_the_door_of_the_kernels() -> None:
    stack, inputs = make_fp8_stack(Block), make_fp8_inputs()
    fusion = make_high(Pieces("stock", True, False, False))
    forward(stack, fusion, inputs)
    assert "fp8 input" in fusion.ledger.proven and all(unequal == 0 for unequal, _ in fusion.ledger.differing.values())
    assert fusion.status(stack).endswith("fp8 products with fast accumulation")


def test_rows_with_scales_of_their_own_reach_every_linear_that_takes_them() -> None:
    stack, inputs = by_rows(make_fp8_stack(Block)), make_fp8_inputs()
    fusion = make_high(Pieces("stock", False, True, False))
    first, stock = forward(stack, fusion, inputs), run(stack, None, inputs)
    assert not torch.equal(first, stock) and torch.equal(forward(stack, fusion, inputs), first)
    # Each Linear's input is off by at most 2^-4 of itself; a mistaken scale would leave nothing of the result.
    assert float((first.float() - stock.float()).norm() / stock.float().norm()) < 0.1
    assert fusion.status(stack).endswith("products of row-wise fp8") and not fusion.ledger.refused


def test_row_wise_fp8_can_be_left_out() -> None:
    stack, inputs = by_rows(make_fp8_stack(Block)), make_fp8_inputs()
    for pieces in (NONE, Pieces("stock", False, False, True)):
        fusion = make_high(pieces)
        for _ in range(2):
            assert torch.equal(forward(stack, fusion, inputs), run(stack, None, inputs))


def test_a_device_without_products_by_rows_keeps_stock_and_says_so() -> None:
    stack, inputs = by_rows(make_fp8_stack(Block)), make_fp8_inputs()
    lossless = make_fp8_fusion()
    assert lossless.host.emission is not None
    emission = dataclasses.replace(
        lossless.host.emission,
        takes_rows=lambda linear: isinstance(linear, RowWiseLinear),
        no_rows=lambda device: "no such GPU",
    )
    host = dataclasses.replace(lossless.host, emission=emission)
    fusion = Fusion("high", host, torch.device(DEVICE), chains=lossless._chains)
    for _ in range(2):
        assert torch.equal(forward(stack, fusion, inputs), run(stack, None, inputs))
    assert fusion.status(stack).endswith("row-wise fp8 dequantised (no such GPU)")


@pytest.mark.parametrize("chain", ["modulate", "gate", "gate_modulate", "silu_mul"])
def test_a_chain_that_is_refused_does_not_make_the_first_result_another(chain: str) -> None:
    """Fast accumulation alone, whose first forward refuses a kernel and so leaves something else to compare."""
    stack, inputs = make_fp8_stack(Block), make_fp8_inputs()
    name = {"gate_modulate": "gate+modulate", "silu_mul": "silu-mul"}.get(chain, chain)
    eager = load_chains()[name].eager

    def wrong(*args: Any) -> Any:
        return tuple(scaled(part) for part in found) if isinstance(found := eager(*args), tuple) else scaled(found)

    def scaled(out: torch.Tensor) -> torch.Tensor:
        return (out.float() * 1.5).to(out.dtype)

    fusion = make_high(Pieces("stock", True, False, False), **{chain: wrong})
    first = forward(stack, fusion, inputs)
    assert name in fusion.ledger.refused
    assert torch.equal(forward(stack, fusion, inputs), first) and torch.equal(forward(stack, fusion, inputs), first)


def test_a_kernel_that_is_far_off_is_refused() -> None:
    """What a miscompiled kernel writes is no other rounding: `high` is close, whatever it is not held to."""
    stack, inputs = make_fp8_stack(Block), make_fp8_inputs()

    def wrong(a: torch.Tensor, b: torch.Tensor, *out: torch.dtype) -> torch.Tensor:
        return silu_mul_off(a, b.float() * 1.05, *out).to(*out or [a.dtype])

    fusion = make_high(Pieces("stock", False, False, True), silu_mul=wrong)
    for _ in range(2):
        assert torch.equal(forward(stack, fusion, inputs), run(stack, None, inputs))
    assert "times as far off as another rounding would be" in fusion.ledger.refused["silu-mul"]


def test_a_tensor_that_is_far_off_is_not_lost_beside_a_larger_one() -> None:
    """The merge gives the residual too, which can be a thousand times as large as what is modulated."""
    stack, (x, *rest) = make_fp8_stack(Block), make_fp8_inputs()
    eager = load_chains()["gate+modulate"].eager

    def wrong(*args: Any) -> Any:
        gated, modulated = eager(*args)
        return gated, (modulated.float() * 1.5).to(modulated.dtype)

    fusion = make_high(Pieces("stock", False, False, True), gate_modulate=wrong)
    forward(stack, fusion, (1000 * x, *rest))
    assert "gate+modulate" in fusion.ledger.refused


@pytest.mark.parametrize("pieces", [ALL, Pieces("stock", False, False, True)], ids=["all", "unproven chains"])
def test_a_refusal_leaves_nothing_to_compare_behind_the_first_result(pieces: Pieces) -> None:
    """A kernel that is refused keeps fp8 from being judged with it; the first result is then still that of the next."""
    stack, inputs = make_fp8_stack(Block), make_fp8_inputs()

    def wrong(a: torch.Tensor, b: torch.Tensor, *out: torch.dtype) -> torch.Tensor:
        return silu_mul_off(a, b.float() * 1.5, *out).to(*out or [a.dtype])

    modulate = load_chains()["modulate"].eager

    def slightly(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float, *out: torch.dtype) -> Any:
        return (modulate(x, weight, scale, eps).float() * 1.01).clamp(-448, 448).to(*out or [x.dtype])

    fusion = make_high(pieces, silu_mul=wrong, modulate=slightly)
    first = forward(stack, fusion, inputs)
    assert "silu-mul" in fusion.ledger.refused and not torch.equal(first, run(stack, None, inputs))
    for _ in range(2):
        assert torch.equal(forward(stack, fusion, inputs), first)


def test_what_is_multiplied_is_said_only_once_it_is_known() -> None:
    stack, fusion = make_fp8_stack(Block), make_high(ALL)
    fusion.self_test(stack)
    assert fusion.ledger.proven and "products" not in fusion.status(stack)
    forward(stack, fusion, make_fp8_inputs())
    assert "fp8 products with fast accumulation" in fusion.status(stack)


@pytest.mark.parametrize(
    ("ours", "theirs", "far"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.02, 0.0], [1.0, 0.0], 1.0),
        ([float("inf"), 1.0], [float("inf"), 1.0], 0.0),
        ([float("inf"), 1.0078125], [float("inf"), 1.0], 0.0078125 / FARTHEST),
        ([0.0, 1.0], [0.0, 0.0], float("inf")),
        ([float("nan"), 1.0], [1.0, 1.0], float("nan")),
    ],
)
def test_how_far_a_tensor_is_from_stock(ours: list[float], theirs: list[float], far: float) -> None:
    count = Count(measured=True)
    count.add(torch.ones(3), torch.ones(3))
    count.add(torch.tensor(ours), torch.tensor(theirs))
    assert count.farthest() == pytest.approx(far, rel=1e-5, nan_ok=True)


def test_a_chain_that_differs_later_is_not_called_exact_any_more() -> None:
    stack = make_fp8_stack(Block)
    eager = load_chains()["silu-mul"].eager

    def wrong_for_two(a: torch.Tensor, b: torch.Tensor, *out: torch.dtype) -> torch.Tensor:
        return (silu_mul_off if len(a) > 1 else eager)(a, b, *out)

    fusion = make_high(Pieces("stock", False, False, True), silu_mul=wrong_for_two)
    x, mask, rope, adaln_input = make_fp8_inputs()
    forward(stack, fusion, (x, mask, rope, adaln_input))
    assert "silu-mul" in fusion.ledger.proven
    forward(stack, fusion, (x.repeat(2, 1, 1), mask, rope, adaln_input.repeat(2, 1, 1)))
    assert "silu-mul" not in fusion.ledger.proven
    fusion.ledger.judge("silu-mul", Count(compared=1, unequal=[torch.tensor(0)]))
    assert "silu-mul" not in fusion.ledger.proven, "nor when another kind of input is equal again"
    assert "silu-mul" not in fusion.status(stack).partition("exact")[0]


def test_a_forward_that_compared_nothing_is_not_run_twice() -> None:
    stack, inputs, fusion = make_fp8_stack(Block), make_fp8_inputs(), make_high(ALL)
    calls: list[int] = []

    def counted() -> torch.Tensor:
        calls.append(1)
        out: torch.Tensor = stack(*inputs)
        return out

    with torch.inference_mode():
        for _ in range(3):
            fusion.run(stack, counted)
    assert len(calls) == 4
    nothing = make_high(NONE, silu_mul=silu_mul_off)
    calls.clear()
    with torch.inference_mode():
        for _ in range(3):
            nothing.run(stack, counted)
    assert len(calls) == 3, "what is refused gives stock's result at once"
    lossless = make_fp8_fusion()
    calls.clear()
    with torch.inference_mode():
        for _ in range(3):
            lossless.run(stack, counted)
    assert len(calls) == 3


def test_unknown_attention() -> None:
    with pytest.raises(ValueError, match="none of auto, cudnn, stock"):
        Pieces("sage")


def test_the_table_names_what_it_was_measured_with() -> None:
    for entry in TABLE:
        assert entry.on and entry.measured_us
        assert all(cudnn < flash for flash, cudnn in entry.measured_us.values())
    assert cudnn_is_faster((9, 0), 256)
    assert not cudnn_is_faster((8, 9), 256) and not cudnn_is_faster((12, 0), 256) and not cudnn_is_faster((9, 0), 64)


def test_attention_that_cudnn_does_not_take_is_declined_by_name() -> None:
    q = torch.zeros(1, 2, 16, 256, device=DEVICE)
    with pytest.raises(KernelDeclined, match="cuDNN does not take heads of 256 in float32 here"):
        cudnn_attention(q, q, q)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
)
@pytest.mark.parametrize("tokens", [77, 1281])
def test_cudnn_attention_is_as_close_as_stock_and_repeats_itself(tokens: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    qkv = torch.randn(2, tokens, 3, 18, 256, generator=generator, device="cuda").bfloat16()
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(dim=2))
    expected = attention_reference(q, k, v)

    def error(out: torch.Tensor) -> float:
        return float((out.double() - expected).norm() / expected.norm())

    ours = cudnn_attention(q, k, v)
    assert error(ours) <= 1.2 * error(F.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous()))
    assert error(ours) < 4e-3  # bf16 keeps 2^-9 of each value, and probabilities are rounded too
    assert torch.equal(cudnn_attention(q, k, v), ours)
