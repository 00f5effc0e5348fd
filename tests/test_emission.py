"""Chains that write fp8 for the Linears behind them, with Linears of the test's that quantise as ComfyUI's do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from ideogram4_fusion.fusion.chains import Chain, load_chains
from ideogram4_fusion.fusion.fusion import Fusion
from ideogram4_fusion.hosts.diffusers.blocks import HOST
from ideogram4_fusion.kernels.quantise import quantise_reference
from ideogram4_fusion.kernels.silu_mul import silu_mul_reference
from ideogram4_fusion.tests.fusing import run
from ideogram4_fusion.tests.quantising import EMISSION, QuantisingLinear, half_of_fp8, seen
from ideogram4_fusion.tests.stack import DEVICE, Stack, make_inputs, make_stack
from torch import nn


@pytest.fixture(autouse=True)
def forget() -> None:
    seen.clear()


def quantising_stack() -> Stack:
    """Activations far beyond 448 in places, so that the clamp matters."""
    stack = make_stack()
    for layer in stack.layers:
        for name in ("w1", "w2", "w3"):
            linear = getattr(layer.feed_forward, name)
            replaced = QuantisingLinear(linear.in_features, linear.out_features, bias=False).to(DEVICE, torch.bfloat16)
            replaced.weight = nn.Parameter(linear.weight * (8 if name != "w2" else 1), requires_grad=False)
            setattr(layer.feed_forward, name, replaced)
    return stack


def make_fusion(**wrong: Callable[..., Any]) -> Fusion:
    """Eager forms stand in for the kernels: this is about who is handed what."""
    chains = {
        name: dataclasses.replace(
            chain, fused=wrong.get(name.replace("-", "_"), chain.eager), inexact=lambda device: None
        )
        for name, chain in load_chains().items()
    }
    chains["fp8 input"] = Chain("fp8 input", quantise_reference, wrong.get("quantise", quantise_reference))
    return Fusion("lossless", dataclasses.replace(HOST, emission=EMISSION), torch.device(DEVICE), chains=chains)


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
