"""Every Linear of a block in fp8: each is proven when it comes, and left to stock where something is in the way."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from ideogram4_fusion.fusion.chains import load_chains
from ideogram4_fusion.fusion.fusion import Fusion
from ideogram4_fusion.kernels.quantise import quantise_reference
from ideogram4_fusion.tests.fp8_stack import (
    Attention,
    Block,
    make_fp8_fusion,
    make_fp8_inputs,
    make_fp8_stack,
)
from ideogram4_fusion.tests.fusing import run
from ideogram4_fusion.tests.quantising import QuantisingLinear, half_of_fp8, seen
from ideogram4_fusion.tests.stack import Stack
from torch import nn

GROUPS = {
    "qkv": ["attention.qkv"],
    "o": ["attention.o"],
    "adaln": ["adaln_modulation"],
    "w1 and w3": ["feed_forward.w1", "feed_forward.w3"],
    "w2": ["feed_forward.w2"],
}


def block_all(stack: Stack, but: list[str]) -> None:
    for name, module in stack.named_modules():
        if isinstance(module, QuantisingLinear):
            module.blocked = not any(name.endswith(part) for part in but)


def equal(stack: Stack, fusion: Fusion, inputs: tuple[Any, ...]) -> bool:
    return torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))


def wrong_in_fp8() -> dict[str, Any]:
    kernels = {name.replace("-", "_").replace("+", "_"): half_of_fp8(c.eager) for name, c in load_chains().items()}
    return {**kernels, "fp8_input": half_of_fp8(quantise_reference)}


def test_all_six_linears_are_given_fp8() -> None:
    stack, inputs, fusion = make_fp8_stack(), make_fp8_inputs(), make_fp8_fusion()
    for _ in range(2):
        seen.clear()
        assert equal(stack, fusion, inputs)
    assert {id(m) for m in stack.modules() if isinstance(m, QuantisingLinear)} == {id(linear) for linear, _ in seen}
    shared = {pointer for linear, pointer in seen if any(linear is layer.adaln_modulation for layer in stack.layers)}
    assert len(shared) == 1, "what every block is given is quantised once"


@pytest.mark.parametrize("group", GROUPS)
def test_a_linear_that_comes_later_is_proven_then(group: str) -> None:
    stack, inputs, fusion = make_fp8_stack(), make_fp8_inputs(), make_fp8_fusion(**wrong_in_fp8())
    block_all(stack, [])
    assert equal(stack, fusion, inputs) and equal(stack, fusion, inputs)
    assert not fusion.ledger.refused
    block_all(stack, GROUPS[group])
    assert equal(stack, fusion, inputs) and equal(stack, fusion, inputs)
    assert list(fusion.ledger.refused) == ["fp8 input"]


@pytest.mark.parametrize(("early", "late"), itertools.permutations(GROUPS, 2))
def test_also_behind_one_that_was_proven(early: str, late: str) -> None:
    """The kernel turns wrong between the two, so that the early proof says nothing of the late one."""
    wrong = [False]
    kernels = {
        name: (lambda *args, good=good, bad=bad: (bad if wrong[0] else good)(*args))
        for (name, bad), good in zip(
            wrong_in_fp8().items(), [*(c.eager for c in load_chains().values()), quantise_reference], strict=True
        )
    }
    stack, inputs, fusion = make_fp8_stack(), make_fp8_inputs(), make_fp8_fusion(**kernels)
    block_all(stack, GROUPS[early])
    assert equal(stack, fusion, inputs) and not fusion.ledger.refused
    wrong[0] = True
    block_all(stack, GROUPS[late])
    assert equal(stack, fusion, inputs)
    assert "fp8 input" in fusion.ledger.refused


def test_the_last_linear_of_attention_is_proven_behind_a_first_that_was() -> None:
    """Attention is handed fp8 and asks for no proof of its own: its block must. The quantiser turns wrong meanwhile."""
    wrong = [False]

    def quantiser(rows: torch.Tensor) -> torch.Tensor:
        return (half_of_fp8(quantise_reference) if wrong[0] else quantise_reference)(rows)

    stack, inputs, fusion = make_fp8_stack(), make_fp8_inputs(), make_fp8_fusion(fp8_input=quantiser)
    block_all(stack, GROUPS["qkv"])
    assert equal(stack, fusion, inputs) and not fusion.ledger.refused
    wrong[0] = True
    assert equal(stack, fusion, inputs), "qkv is handed what its norm wrote, and not what was quantised"
    block_all(stack, GROUPS["qkv"] + GROUPS["o"])
    assert equal(stack, fusion, inputs)
    assert list(fusion.ledger.refused) == ["fp8 input"]


def test_a_hooked_attention_sees_tensors() -> None:
    stack, inputs, fusion = make_fp8_stack(), make_fp8_inputs(), make_fp8_fusion()
    kinds: list[type] = []
    stack.layers[1].attention.register_forward_pre_hook(lambda _, args: kinds.append(type(args[0])))
    for _ in range(2):
        assert equal(stack, fusion, inputs)
    assert set(kinds) == {torch.Tensor}


def test_what_lies_with_gaps_is_left_to_the_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "gaps", True)
    stack, inputs, fusion = make_fp8_stack(), make_fp8_inputs(), make_fp8_fusion()
    for _ in range(2):
        assert equal(stack, fusion, inputs)
    assert not fusion.ledger.refused and not any(linear is stack.layers[0].attention.o for linear, _ in seen)


def test_attention_that_differs_in_its_first_call_alone_is_taken_at_its_second() -> None:
    """As stock's on an H200: the form is right, and only the first call of a process is not what later ones are."""
    calls = [0]

    class Warming(Attention):
        def forward(self, x: torch.Tensor, mask: Any, rope: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return super().forward(x, mask, rope) + (calls[0] == 1)

    class WarmingBlock(Block):
        def __init__(self, *_: object) -> None:
            super().__init__()
            self.attention = Warming()

    stack, inputs, fusion = make_fp8_stack(WarmingBlock), make_fp8_inputs(), make_fp8_fusion()
    run(stack, fusion, inputs)
    assert not fusion.ledger.refused
    assert equal(stack, fusion, inputs)


def test_a_form_that_is_wrong_costs_the_rope_alone() -> None:
    class Other(Attention):
        def forward(self, x: torch.Tensor, mask: Any, rope: torch.Tensor) -> torch.Tensor:
            return super().forward(x, mask, rope) * 1.01

    class OtherBlock(Block):
        def __init__(self, *_: object) -> None:
            super().__init__()
            self.attention = Other()

    stack, inputs, fusion = make_fp8_stack(OtherBlock), make_fp8_inputs(), make_fp8_fusion()
    for _ in range(3):
        assert equal(stack, fusion, inputs)
    assert list(fusion.ledger.refused) == ["rope"] and "fp8 input" in fusion.ledger.proven


def test_a_modulation_of_something_else_is_left_to_stock() -> None:
    class Doubling(Block):
        def modulation(self, adaln_input: torch.Tensor) -> torch.Tensor:
            return super().modulation(adaln_input * 2)

    stack, inputs, fusion = make_fp8_stack(Doubling), make_fp8_inputs(), make_fp8_fusion()
    for _ in range(2):
        assert equal(stack, fusion, inputs)
    assert fusion.status(stack).startswith("stock: ")


def test_what_a_forward_remembers_goes_even_if_its_first_block_is_left_to_stock() -> None:
    stack, inputs, fusion = make_fp8_stack(), make_fp8_inputs(), make_fp8_fusion()
    assert equal(stack, fusion, inputs)
    buffer = inputs[3].clone()
    with torch.inference_mode(), fusion.mounted(stack):
        stack(*inputs[:3], buffer)
        buffer.mul_(3)
        handle = stack.layers[0].attention_norm1.register_forward_hook(lambda *_: None)
        ours = stack(*inputs[:3], buffer)
        handle.remove()
    assert torch.equal(ours, run(stack, None, (*inputs[:3], buffer)))


def test_a_host_that_has_changed_costs_the_fp8_alone() -> None:
    """Whatever a newer core no longer has on its Linears, the render goes on."""

    def fail(linear: nn.Module) -> bool:
        raise AttributeError("weight_function")

    stack, inputs, fusion = make_fp8_stack(), make_fp8_inputs(), make_fp8_fusion()
    assert fusion.host.emission is not None
    fusion.host.__dict__["emission"] = type(fusion.host.emission)(fail, *list(vars(fusion.host.emission).values())[1:])
    for _ in range(2):
        assert equal(stack, fusion, inputs)
    assert list(fusion.ledger.refused) == ["fp8 input"]
