"""What the proof of fp8 inputs covers, and that nothing remembered outlives the forward it held for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from ideogram4_fusion.fusion.emission import FP8
from ideogram4_fusion.fusion.fusion import Fusion
from ideogram4_fusion.kernels.quantise import quantise_reference
from ideogram4_fusion.kernels.rms_norm_gate_modulate import rms_norm_gate_modulate_reference
from ideogram4_fusion.kernels.silu_mul import silu_mul_reference
from ideogram4_fusion.tests.fusing import run
from ideogram4_fusion.tests.quantising import EMISSION, QuantisingLinear, half_of_fp8, make_fusion, quantising_stack
from ideogram4_fusion.tests.stack import Stack, make_inputs
from torch import nn


def stack_with_fp8_modulation() -> Stack:
    stack = quantising_stack()
    for layer in stack.layers:
        stock = layer.adaln_modulation
        spared = QuantisingLinear(stock.in_features, stock.out_features, bias=False).to(stock.weight.device)
        spared.weight = nn.Parameter(stock.weight, requires_grad=False)
        layer.adaln_modulation = spared
    return stack


def equal(stack: Stack, fusion: Fusion, inputs: tuple[Any, ...]) -> bool:
    return torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))


def test_a_linear_freed_behind_one_that_was_free_is_proven_too() -> None:
    """w1 and w3 are given fp8 all along; only w2, whose kernel is wrong, comes later."""
    stack, inputs, fusion = quantising_stack(), make_inputs(), make_fusion(silu_mul=half_of_fp8(silu_mul_reference))
    for layer in stack.layers:
        layer.feed_forward.w2.blocked = True
    assert equal(stack, fusion, inputs) and equal(stack, fusion, inputs)
    assert "fp8 input" in fusion.ledger.proven
    for layer in stack.layers:
        layer.feed_forward.w2.blocked = False
    assert equal(stack, fusion, inputs)
    assert "fp8 input" in fusion.ledger.refused


@pytest.mark.parametrize("result", [0, 1])
def test_the_merged_kernel_is_proven_in_the_form_that_runs(result: int) -> None:
    def wrong(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        both = list(rms_norm_gate_modulate_reference(*args))
        if args[-1] == FP8:
            both[result] = (both[result].float() / 2).to(both[result].dtype)
        return both[0], both[1]

    stack, inputs, fusion = quantising_stack(), make_inputs(), make_fusion(**{"gate+modulate": wrong})
    for _ in range(3):
        assert equal(stack, fusion, inputs)
    assert list(fusion.ledger.refused) == ["fp8 input"]


def test_a_wrong_kernel_is_not_laid_at_the_door_of_fp8() -> None:
    def wrong(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return quantise_reference(F.silu(a) * b * 1.5, out_dtype)

    stack, inputs, fusion = quantising_stack(), make_inputs(), make_fusion(silu_mul=wrong)
    for _ in range(3):
        assert equal(stack, fusion, inputs)
    assert list(fusion.ledger.refused) == ["silu-mul"] and "fp8 input" in fusion.ledger.proven


def test_what_a_linear_takes_is_asked_again_in_the_next_forward_of_one_call() -> None:
    stack, inputs, fusion = quantising_stack(), make_inputs(), make_fusion()
    assert equal(stack, fusion, inputs)
    w2 = stack.layers[1].feed_forward.w2
    w2.blocked = True
    stock = run(stack, None, inputs)
    w2.blocked = False
    with torch.inference_mode(), fusion.mounted(stack):
        stack(*inputs)
        w2.blocked = True
        assert torch.equal(stack(*inputs), stock)


def test_a_shared_input_is_quantised_again_in_the_next_forward_of_one_call() -> None:
    stack, inputs, fusion = stack_with_fp8_modulation(), make_inputs(), make_fusion()
    assert equal(stack, fusion, inputs)
    buffer = inputs[3].clone()
    with torch.inference_mode(), fusion.mounted(stack):
        stack(*inputs[:3], buffer)
        buffer.mul_(3)
        ours = stack(*inputs[:3], buffer)
    assert torch.equal(ours, run(stack, None, (*inputs[:3], buffer)))


def test_a_hook_that_writes_into_a_shared_input_makes_a_new_proof() -> None:
    stack, inputs, fusion = stack_with_fp8_modulation(), make_inputs(), make_fusion()
    assert equal(stack, fusion, inputs)
    stack.layers[1].register_forward_pre_hook(lambda _, args: (args[3].mul_(2), None)[1])
    for _ in range(2):
        ours, stock = (run(stack, f, (*inputs[:3], inputs[3].clone())) for f in (fusion, None))
        assert torch.equal(ours, stock)


def test_a_feed_forward_replaced_inside_the_call_is_given_tensors() -> None:
    stack, inputs, fusion = quantising_stack(), make_inputs(), make_fusion()
    assert equal(stack, fusion, inputs)
    ffn = stack.layers[0].feed_forward
    with torch.inference_mode(), fusion.mounted(stack):
        ours = ffn.forward
        ffn.forward = lambda x: ours(x * 1.0)
        try:
            out = stack(*inputs)
        finally:
            ffn.forward = ours
    assert torch.equal(out, run(stack, None, inputs))


def test_hooks_on_all_modules_see_what_stock_shows_them() -> None:
    stack, inputs, fusion = quantising_stack(), make_inputs(), make_fusion()
    assert equal(stack, fusion, inputs)
    kinds: list[type] = []
    handles = (
        nn.modules.module.register_module_forward_pre_hook(lambda _, args: kinds.append(type(args[0]))),
        nn.modules.module.register_module_forward_hook(
            lambda module, _, out: out * 2 if isinstance(module, nn.RMSNorm) else None
        ),
    )
    try:
        assert equal(stack, fusion, inputs)
    finally:
        for handle in handles:
            handle.remove()
    assert set(kinds) == {torch.Tensor}


def test_what_the_host_rests_on_is_part_of_the_proof() -> None:
    rests_on: list[object] = [object()]
    fusion = make_fusion()
    fusion.host = dataclasses.replace(fusion.host, emission=EMISSION, rests_on=lambda: rests_on)
    stack, inputs = quantising_stack(), make_inputs()
    run(stack, fusion, inputs)
    run(stack, fusion, inputs)
    revision = fusion.ledger.revision
    rests_on[0] = object()
    run(stack, fusion, inputs)
    assert fusion.ledger.revision == revision + 1
