"""The proof: equality in shadow and after, and the gate against kernels made wrong on purpose."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from ideogram4_fusion.fusion.fusion import Fusion
from ideogram4_fusion.hosts.diffusers.blocks import HOST
from ideogram4_fusion.tests.fusing import CHAINS, Kernel, all_chains, eager_everywhere, make_fusion, run, untouched
from ideogram4_fusion.tests.stack import DEVICE, make_inputs, make_stack


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_lossless_is_byte_equal_in_shadow_and_after(batch: int, masked: bool) -> None:
    stack, inputs = make_stack(), make_inputs(batch)
    if not masked:
        inputs = (inputs[0], None, *inputs[2:])
    stock, fusion = run(stack, None, inputs), make_fusion()
    for _ in range(3):
        assert torch.equal(run(stack, fusion, inputs).view(torch.int16), stock.view(torch.int16))
    exact = "modulate, gate, gate+modulate, silu-mul, rope exact"
    if DEVICE == "cpu":
        stock_norms = "modulate, gate, gate+modulate stock (ATen adds a row up in another order on the CPU)"
        exact = f"silu-mul, rope exact; {stock_norms}"
    assert fusion.status(stack) == f"lossless: 3/3 blocks; {exact}"


def test_the_kernels_do_run_once_proven() -> None:
    calls: dict[str, int] = dict.fromkeys(CHAINS, 0)

    def counted(name: str, eager: Kernel) -> Kernel:
        def fused(*args: object) -> torch.Tensor:
            calls[name] += 1
            return eager(*args)

        return fused

    chains = {name: counted(name, chain.eager) for name, chain in all_chains().items()}
    stack, inputs, fusion = make_stack(), make_inputs(), make_fusion(chains)
    run(stack, fusion, inputs)
    shadow = dict(calls)
    run(stack, fusion, inputs)
    once = {name: calls[name] - shadow[name] for name in CHAINS}
    assert shadow == {"modulate": 6, "gate": 6, "gate+modulate": 3, "silu-mul": 3, "rope": 6}
    assert once == {"modulate": 3, "gate": 3, "gate+modulate": 3, "silu-mul": 3, "rope": 6}


def off_by_one_ulp(eager: Kernel) -> Kernel:
    def fused(*args: object) -> torch.Tensor:
        out = eager(*args)
        (out[0] if isinstance(out, tuple) else out).view(-1)[5:6].view(torch.int16).add_(1)
        return out

    return fused


def negative_zero(eager: Kernel) -> Kernel:
    """Equal to its reference for `==`, but not in its bytes."""
    return lambda *args: torch.where(eager(*args) == 0, -0.0, eager(*args))


def full_of_nan(eager: Kernel) -> Kernel:
    def fused(*args: object) -> Any:
        out = eager(*args)
        nan = [torch.full_like(o, torch.nan) for o in (out if isinstance(out, tuple) else (out,))]
        return tuple(nan) if isinstance(out, tuple) else nan[0]

    return fused


def raising(eager: Kernel) -> Kernel:
    def fused(*args: object) -> torch.Tensor:
        raise RuntimeError("out of shared memory")

    return fused


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("wrong", [off_by_one_ulp, full_of_nan, raising])
def test_a_wrong_kernel_is_refused_and_the_image_stays_stock(
    name: str,
    wrong: Callable[[Kernel], Kernel],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stack, inputs = make_stack(), make_inputs()
    kernels = eager_everywhere() | {name: wrong(all_chains()[name].eager)}
    stock, fusion = run(stack, None, inputs), make_fusion(kernels)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(run(stack, fusion, inputs), stock)
    assert list(fusion.ledger.refused) == [name]
    assert [record.getMessage() for record in caplog.records if name in record.getMessage()] == [
        f"Ideogram 4 fusion: {name} runs stock: {fusion.ledger.refused[name]}"
    ]
    others = ", ".join(chain for chain in CHAINS if chain != name)
    assert fusion.status(stack) == (
        f"lossless: 3/3 blocks; {others} exact; {name} stock ({fusion.ledger.refused[name]})"
    )
    assert untouched(stack)


def test_equality_is_that_of_bytes() -> None:
    stack, inputs = make_stack(), make_inputs()
    for layer in stack.layers:
        layer.feed_forward.w3.weight.zero_()
    fusion = make_fusion(eager_everywhere() | {"silu-mul": negative_zero(all_chains()["silu-mul"].eager)})
    run(stack, fusion, inputs)
    assert "silu-mul" in fusion.ledger.refused


def test_a_kernel_wrong_in_the_last_block_only_is_found() -> None:
    stack, inputs = make_stack(), make_inputs()
    eager = all_chains()["silu-mul"].eager
    calls = 0

    def fused(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return eager(a, b) if calls % 3 else eager(a, b) + 1

    fusion = make_fusion(eager_everywhere() | {"silu-mul": fused})
    assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert "silu-mul" in fusion.ledger.refused


def test_a_kernel_that_fails_at_a_new_shape_is_caught_there() -> None:
    """Two images are another broadcast class, and proven anew; a new number of tokens is not."""
    stack, one, longer, two = make_stack(), make_inputs(1), make_inputs(1, tokens=41), make_inputs(2)
    eager = all_chains()["modulate"].eager
    seen: list[int] = []

    def fused(x: torch.Tensor, *args: object) -> torch.Tensor:
        seen.append(x.shape[0])
        return eager(x, *args) if x.shape[0] == 1 else eager(x, *args) * 2

    fusion = make_fusion(eager_everywhere() | {"modulate": fused})
    for inputs in (one, one, longer):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert "modulate" in fusion.ledger.proven and len(seen) == 12
    for _ in range(2):
        assert torch.equal(run(stack, fusion, two), run(stack, None, two))
    assert "modulate" in fusion.ledger.refused


def test_a_kernel_that_raises_after_its_proof_falls_back_in_the_middle_of_a_forward() -> None:
    stack, inputs = make_stack(), make_inputs()
    eager = all_chains()["gate"].eager
    calls = 0

    def fused(*args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise RuntimeError("the driver is gone")
        return eager(*args)

    fusion = make_fusion(eager_everywhere() | {"gate": fused})
    for _ in range(3):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert "the driver is gone" in fusion.ledger.refused["gate"] and calls == 9


def test_high_keeps_a_kernel_that_differs_and_says_by_how_much() -> None:
    stack, inputs = make_stack(), make_inputs()
    kernels = eager_everywhere() | {"silu-mul": off_by_one_ulp(all_chains()["silu-mul"].eager)}
    fusion = make_fusion(kernels, "high")
    stock = run(stack, None, inputs)
    assert torch.equal(run(stack, fusion, inputs), stock)  # the shadow returns stock
    assert not torch.equal(run(stack, fusion, inputs), stock)
    assert f"silu-mul fused (3 of {3 * 37 * 256:,} values differed when last compared)" in fusion.status(stack)


class Interrupt(BaseException):
    """As ComfyUI's InterruptProcessingException, no Exception."""


def test_an_interrupted_forward_proves_nothing_and_leaves_nothing_behind() -> None:
    stack, inputs = make_stack(), make_inputs()
    fusion = make_fusion(eager_everywhere())

    def interrupt(*_: object) -> None:
        raise Interrupt

    handle = stack.layers[2].feed_forward.w2.register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupt):
        run(stack, fusion, inputs)
    handle.remove()
    assert untouched(stack) and not fusion.ledger.proven
    assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert fusion.ledger.proven == set(CHAINS)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 0),
        pytest.param((0, 37), marks=pytest.mark.skipif(DEVICE == "cuda", reason="diffusers' attention fails there")),
    ],
)
def test_nothing_is_proven_by_no_values(shape: tuple[int, int]) -> None:
    stack = make_stack()
    wrong = make_fusion(eager_everywhere() | {"silu-mul": lambda *args: all_chains()["silu-mul"].eager(*args) + 1})
    run(stack, wrong, make_inputs(*shape))
    inputs = make_inputs(max(shape[0], 2), 37)
    assert torch.equal(run(stack, wrong, inputs), run(stack, None, inputs))


def test_self_test_judges_before_the_first_image() -> None:
    stack = make_stack()
    fusion = make_fusion(eager_everywhere() | {"gate": full_of_nan(all_chains()["gate"].eager)})
    fusion.self_test(stack)
    said = fusion.status(stack)
    assert said.startswith("lossless: 3/3 blocks; modulate, gate+modulate, silu-mul exact; ")
    assert "; rope to be proven on the first step; gate stock (" in said


def test_a_self_test_without_room_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **named: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    stack, fusion = make_stack(), make_fusion(eager_everywhere())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", full)
        fusion.self_test(stack)
    assert not fusion.ledger.refused and not fusion.ledger.proven


def test_more_arguments_than_a_block_takes_are_refused_as_stock_refuses_them() -> None:
    stack, inputs, fusion = make_stack(), make_inputs(), make_fusion(eager_everywhere())
    run(stack, fusion, inputs)
    for mounted in (contextlib.nullcontext(), fusion.mounted(stack)):
        with mounted, torch.inference_mode(), pytest.raises(TypeError):
            stack.layers[0](*inputs, None)


def test_no_such_quality() -> None:
    with pytest.raises(ValueError, match="neither lossless nor high"):
        Fusion("off", HOST, torch.device(DEVICE))
