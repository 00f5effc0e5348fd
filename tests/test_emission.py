"""Chains that write fp8 for the Linears behind them, with Linears of the test's that quantise as ComfyUI's do."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from ideogram4_fusion.kernels.silu_mul import silu_mul_reference
from ideogram4_fusion.tests.fusing import run
from ideogram4_fusion.tests.quantising import half_of_fp8, make_fusion, quantising_stack, seen
from ideogram4_fusion.tests.stack import make_inputs


@pytest.fixture(autouse=True)
def forget() -> None:
    seen.clear()


@pytest.mark.parametrize("batch", [1, 2])
def test_linears_are_handed_what_they_would_make_themselves(batch: int) -> None:
    stack, inputs, fusion = quantising_stack(), make_inputs(batch), make_fusion()
    stock = run(stack, None, inputs)
    for _ in range(2):
        seen.clear()
        assert torch.equal(run(stack, fusion, inputs), stock)
    assert fusion.status(stack).startswith(
        "lossless: 3/3 blocks; modulate, gate, gate+modulate, silu-mul, rope, fp8 input"
    )
    for layer in stack.layers:
        handed = {name: [p for m, p in seen if m is getattr(layer.feed_forward, name)] for name in ("w1", "w2", "w3")}
        assert len(handed["w1"]) == 1 and handed["w1"] == handed["w3"], "w1 and w3 share one tensor"
        assert len(handed["w2"]) == 1


@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_a_blocked_linear_gets_its_bf16_input(name: str) -> None:
    """As where one layer has a LoRA: the others are still spared, and what is shared is not."""
    stack, inputs, fusion = quantising_stack(), make_inputs(), make_fusion()
    blocked = getattr(stack.layers[1].feed_forward, name)
    blocked.blocked = True
    stock = run(stack, None, inputs)
    for _ in range(2):
        assert torch.equal(run(stack, fusion, inputs), stock)
    handed = {id(module) for module, _ in seen}
    assert id(blocked) not in handed and id(stack.layers[0].feed_forward.w2) in handed
    assert (id(stack.layers[1].feed_forward.w2) in handed) == (name != "w2")


def test_a_linear_freed_after_the_proof_is_proven_anew() -> None:
    stack, inputs, fusion = quantising_stack(), make_inputs(), make_fusion()
    freed = stack.layers[2].feed_forward.w2
    freed.blocked = True
    for _ in range(2):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    freed.blocked = False
    for _ in range(2):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert any(module is freed for module, _ in seen)


def test_wrong_fp8_is_refused_and_the_bf16_kernels_stay() -> None:
    wrong = half_of_fp8(silu_mul_reference)
    stack, inputs, fusion = quantising_stack(), make_inputs(), make_fusion(silu_mul=wrong)
    for _ in range(3):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert list(fusion.ledger.refused) == ["fp8 input"]
    assert "modulate, gate, gate+modulate, silu-mul, rope exact; fp8 input stock (" in fusion.status(stack)


def test_a_hooked_feed_forward_sees_bf16() -> None:
    stack, inputs, fusion = quantising_stack(), make_inputs(), make_fusion()
    dtypes: list[torch.dtype] = []
    stack.layers[0].feed_forward.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    for _ in range(2):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert set(dtypes) == {torch.bfloat16}
