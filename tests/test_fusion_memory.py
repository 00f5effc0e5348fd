"""Memory that suffices for stock and not for a comparison beside it: no image is lost, nothing is taken for proven."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from diffusers.models.transformers.transformer_ideogram4 import Ideogram4TransformerBlock
from ideogram4_fusion.kernels.availability import unavailable
from ideogram4_fusion.tests.fusing import Kernel, eager_everywhere, make_fusion, run
from ideogram4_fusion.tests.stack import DEVICE, Stack, make_inputs, make_stack

# As PyTorch's allocator says it, and as the CUDA runtime and Triton's launcher do.
NO_MEMORY = [
    torch.OutOfMemoryError(),
    getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]
however_it_is_said = pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
STARVED = "stock: too little memory to compare with stock"


def raising(error: Exception) -> Kernel:
    def full(*args: Any) -> torch.Tensor:
        raise error

    return full


@however_it_is_said
@pytest.mark.parametrize("chain", ["modulate", "silu-mul", "rope"])
def test_memory_that_only_the_comparison_lacks_costs_no_image(chain: str, error: Exception) -> None:
    stack, inputs = make_stack(), make_inputs()
    fusion = make_fusion({**eager_everywhere(), chain: raising(error)})
    for _ in range(2):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert fusion.status(stack) == STARVED


@however_it_is_said
def test_a_kernel_that_found_no_memory_is_no_wrong_kernel(error: Exception) -> None:
    """Its eager form stands in for that once; the kernel is as proven as it was."""
    silu_mul = eager_everywhere()["silu-mul"]
    full: list[Exception] = []

    def tight(*args: Any) -> torch.Tensor:
        if full:
            raise full.pop()
        return silu_mul(*args)

    stack, inputs, fusion = make_stack(), make_inputs(), make_fusion({**eager_everywhere(), "silu-mul": tight})
    run(stack, fusion, inputs)
    full.append(error)
    for _ in range(2):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert not full and "silu-mul, rope exact" in fusion.status(stack)


@however_it_is_said
def test_a_self_test_that_finds_no_memory_for_a_kernel_refuses_none(error: Exception) -> None:
    stack, fusion = make_stack(), make_fusion({**eager_everywhere(), "silu-mul": raising(error)})
    fusion.self_test(stack)
    assert "silu-mul" not in fusion.ledger.refused and "silu-mul" not in fusion.ledger.proven


@however_it_is_said
def test_a_full_gpu_is_no_gpu_without_kernels(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ideogram4_fusion.kernels.silu_mul.silu_mul", raising(error))
    assert unavailable(torch.device(DEVICE)) is None


def test_what_found_no_room_once_is_compared_where_it_is_smaller_and_fused_from_then_on() -> None:
    silu_mul = eager_everywhere()["silu-mul"]
    calls: list[int] = []

    def tight(*args: Any) -> torch.Tensor:
        calls.append(args[0].shape[1])
        if args[0].shape[1] > 30 and len(calls) == 1:
            raise torch.OutOfMemoryError
        return silu_mul(*args)

    stack, large, small = make_stack(), make_inputs(tokens=37), make_inputs(tokens=29)
    fusion = make_fusion({**eager_everywhere(), "silu-mul": tight})
    for _ in range(2):
        assert torch.equal(run(stack, fusion, large), run(stack, None, large))
    assert calls == [37], "as large a forward is not compared again"
    for inputs in (small, large):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert calls == [37, 29, 29, 29, 37, 37, 37] and "silu-mul, rope exact" in fusion.status(stack)


def test_one_models_proof_is_not_told_of_another_that_found_no_room() -> None:
    silu_mul = eager_everywhere()["silu-mul"]

    def tight(*args: Any) -> torch.Tensor:
        if args[0].shape[1] > 30:
            raise torch.OutOfMemoryError
        return silu_mul(*args)

    fusion = make_fusion({**eager_everywhere(), "silu-mul": tight})
    conditional, unconditional = make_stack(), make_stack(seed=1)
    run(conditional, fusion, make_inputs(tokens=37))
    run(unconditional, fusion, make_inputs(tokens=29))
    assert fusion.status(conditional) == STARVED and fusion.unfused_reason(conditional) is not None
    assert "silu-mul, rope exact" in fusion.status(unconditional)
    run(unconditional, fusion, make_inputs(batch=2, tokens=37))
    assert "some inputs may be stock (too little memory" in fusion.status(unconditional)


def test_a_skipped_first_block_leaves_its_size_to_the_others() -> None:
    silu_mul, calls = eager_everywhere()["silu-mul"], 0

    def tight(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError
        return silu_mul(*args)

    stack, fusion = make_stack(), make_fusion({**eager_everywhere(), "silu-mul": tight})
    x, *rest = make_inputs(tokens=37)
    with torch.inference_mode(), fusion.mounted(stack):
        for layer in stack.layers[1:]:
            x = layer(x, *rest)
    run(stack, fusion, make_inputs(tokens=29))
    assert "silu-mul, rope exact" in fusion.status(stack)


def _wrong_for_two() -> Any:
    modulate = eager_everywhere()["modulate"]

    def wrong(*args: Any) -> torch.Tensor:
        out: torch.Tensor = modulate(*args)
        return out + 1 if args[0].shape[0] == 2 else out

    return make_fusion({**eager_everywhere(), "modulate": wrong})


def test_a_forward_that_failed_inside_a_call_proves_nothing() -> None:
    """A wrapper that tries a smaller input: the call comes to its end, and its first forward did not."""
    stack, fusion, both = make_stack(), _wrong_for_two(), make_inputs(batch=2, tokens=37)
    fails = [RuntimeError("stock itself")]

    def fail(*args: Any) -> None:
        if fails:
            raise fails.pop()

    stack.layers[0].attention.to_out[0].register_forward_pre_hook(fail)
    with torch.inference_mode(), fusion.mounted(stack):
        with pytest.raises(RuntimeError, match="stock itself"):
            stack(*both)
        stack(*make_inputs(tokens=10))
    for _ in range(2):
        assert torch.equal(run(stack, fusion, both), run(stack, None, both))


@however_it_is_said
def test_stock_gets_the_memory_that_the_comparison_beside_it_held(error: Exception) -> None:
    stack, fusion, inputs = make_stack(), make_fusion(eager_everywhere()), make_inputs()
    expected = run(stack, None, inputs)
    tries: list[int] = []

    def fail_once(*args: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise error

    stack.layers[1].feed_forward.w2.register_forward_pre_hook(fail_once)
    for _ in range(2):
        assert torch.equal(run(stack, fusion, inputs), expected)
    assert fusion.status(stack) == STARVED


def test_a_first_picture_at_high_that_was_cut_short_is_the_later_one() -> None:
    """The feed-forward is proven and inexact; a new kind of modulation then finds no room to be compared."""
    eager = eager_everywhere()
    full: list[int] = []

    def rounded_otherwise(*args: Any) -> torch.Tensor:
        out = eager["silu-mul"](*args).clone()
        out.view(-1)[:9] *= 1.01
        return out

    def modulate(*args: Any) -> torch.Tensor:
        if full:
            full.pop()
            raise torch.OutOfMemoryError
        out: torch.Tensor = eager["modulate"](*args)
        return out

    stack: Stack = make_stack()
    fusion = make_fusion({**eager, "silu-mul": rounded_otherwise, "modulate": modulate}, "high")
    x, mask, rope, adaln_input = make_inputs(tokens=37)

    def render(adaln_input: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return fusion.run(stack, lambda: stack(x, mask, rope, adaln_input))

    render(adaln_input)
    full.append(1)
    each_token = adaln_input.expand(1, 37, -1).contiguous()
    first = render(each_token)
    assert not full and torch.equal(render(each_token), first)


class InPlace(Ideogram4TransformerBlock):
    """The block with its first residual added in place."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, image_rotary_emb: Any, adaln_input: torch.Tensor
    ) -> torch.Tensor:
        scale_msa, gate_msa, scale_mlp, gate_mlp = self.adaln_modulation(adaln_input).chunk(4, dim=-1)
        h = self.attention_norm1(hidden_states) * (1.0 + scale_msa)
        h = self.attention(h, attention_mask=attention_mask, image_rotary_emb=image_rotary_emb)
        hidden_states += torch.tanh(gate_msa) * self.attention_norm2(h)
        h = self.feed_forward(self.ffn_norm1(hidden_states) * (1.0 + scale_mlp))
        return hidden_states + torch.tanh(gate_mlp) * self.ffn_norm2(h)


def test_a_block_that_wrote_into_its_input_does_not_begin_anew() -> None:
    """Then there is no image, as there is none without the pack; a wrong one would be worse."""
    stack, fusion, (hidden, *rest) = make_stack(block=InPlace), make_fusion(eager_everywhere()), make_inputs()
    fails = [torch.OutOfMemoryError(), torch.OutOfMemoryError()]  # of the feed-forward, and of its second try

    def fail(*args: Any) -> None:
        if fails:
            raise fails.pop()

    hook = stack.layers[0].feed_forward.w2.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        run(stack, fusion, (hidden.clone(), *rest))
    hook.remove()
    assert not fails
    assert torch.equal(run(stack, fusion, (hidden.clone(), *rest)), run(stack, None, (hidden.clone(), *rest)))
