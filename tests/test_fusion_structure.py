"""Which blocks are fused: those that are what they seem, and stay so."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from ideogram4_fusion.fusion.fusion import Fusion
from ideogram4_fusion.hosts.diffusers.blocks import HOST
from ideogram4_fusion.tests.fusing import Gelu, eager_everywhere, make_fusion, run, untouched
from ideogram4_fusion.tests.stack import DEVICE, Stack, make_inputs, make_stack
from torch import nn


class OtherFormula(nn.Module):
    """The parts of the block under the same names, put together in another way."""

    def __init__(self, *args: object) -> None:
        super().__init__()
        from diffusers.models.transformers.transformer_ideogram4 import Ideogram4TransformerBlock

        for name, child in Ideogram4TransformerBlock(*args).named_children():
            self.add_module(name, child)

    def forward(
        self, x: torch.Tensor, attention_mask: object, image_rotary_emb: object, adaln_input: torch.Tensor
    ) -> torch.Tensor:
        scale, gate, *_ = self.adaln_modulation(adaln_input).chunk(4, dim=-1)
        h = self.attention(
            self.attention_norm1(x) * (1.0 + scale), attention_mask=attention_mask, image_rotary_emb=image_rotary_emb
        )
        x = x + torch.sigmoid(gate) * self.attention_norm2(h)
        return x + self.ffn_norm2(self.feed_forward(self.ffn_norm1(x)))


@pytest.mark.parametrize("quality", ["lossless", "high"])
def test_blocks_that_compute_something_else_run_stock(quality: str) -> None:
    stack, inputs = make_stack(block=OtherFormula), make_inputs()
    fusion = make_fusion(eager_everywhere(), quality)
    for _ in range(2):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert fusion.status(stack).startswith("stock: the blocks compute something else")
    assert fusion.unfused_reason(stack) is not None


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda b: b.ffn_norm1.float(), "block 1: the weight of ffn_norm1 is float32, not bfloat16"),
        (lambda b: b.__delattr__("attention_norm2"), "block 1: Ideogram4TransformerBlock has no attention_norm2"),
        (lambda b: b.feed_forward.__delattr__("w3"), "block 1: feed_forward has no w3"),
        (
            lambda b: setattr(b, "ffn_norm2", nn.LayerNorm(128).bfloat16()),
            "block 1: ffn_norm2 is a torch.nn.modules.normalization.LayerNorm",
        ),
    ],
)
def test_one_unfit_block_leaves_the_whole_model_stock(spoil: Callable[[nn.Module], object], reason: str) -> None:
    stack = make_stack()
    spoil(stack.layers[1])
    fusion = make_fusion()
    assert fusion.status(stack).startswith(f"stock: {reason}")
    with fusion.mounted(stack):
        assert untouched(stack)


def test_diffusers_own_norm_is_declined_by_name() -> None:
    fusion = make_fusion()
    assert "diffusers.models.normalization.RMSNorm, which rounds unlike" in fusion.status(Stack())


def test_another_model_is_declined_by_name() -> None:
    assert make_fusion().status(nn.Linear(2, 2)) == "stock: Linear has no Ideogram 4 blocks"


def test_a_model_that_computes_in_another_dtype_is_declined_by_name() -> None:
    fusion = Fusion("lossless", HOST, torch.device(DEVICE), torch.float32)
    assert fusion.status(make_stack()) == "stock: the model computes in float32 here, the kernels in bfloat16"


def test_what_is_exchanged_after_the_proof_is_proven_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class patched for everybody, a norm put in another's place: no module says so of itself."""
    stack, inputs = make_stack(), make_inputs()
    fusion = make_fusion(eager_everywhere())
    run(stack, fusion, inputs)
    ffn = type(stack.layers[0].feed_forward)
    before = ffn.forward
    with monkeypatch.context() as patch:
        patch.setattr(ffn, "forward", lambda self, x: 2 * before(self, x))
        for _ in range(2):
            assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    stack.layers[1].attention_norm1 = nn.RMSNorm(128, eps=1e-2).to(DEVICE, torch.bfloat16)
    fresh = make_fusion(eager_everywhere())
    run(stack, fresh, inputs)
    stack.layers[1].attention_norm1 = nn.RMSNorm(128, eps=1.0).to(DEVICE, torch.bfloat16)
    for _ in range(2):
        assert torch.equal(run(stack, fresh, inputs), run(stack, None, inputs))


@pytest.mark.parametrize("strange", ["never calls w3", "calls w2 twice", "halves the tokens"])
def test_blocks_that_use_their_parts_otherwise_run_stock(strange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, inputs = make_stack(), make_inputs(tokens=36)
    ffn = type(stack.layers[0].feed_forward)
    before = ffn.forward
    forwards = {
        "never calls w3": lambda self, x: self.w2(torch.nn.functional.gelu(self.w1(x))),
        "calls w2 twice": lambda self, x: sum(before(self, x) for _ in range(2)),
        "halves the tokens": lambda self, x: before(self, x[:, ::2]).repeat_interleave(2, dim=1),
    }
    monkeypatch.setattr(ffn, "forward", forwards[strange])
    fusion = make_fusion(eager_everywhere())
    for _ in range(2):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert untouched(stack)


@pytest.mark.parametrize("part", ["ffn_norm1", "feed_forward"])
def test_what_stood_on_a_model_for_one_clone_is_forgotten_with_it(part: str) -> None:
    """A norm that declines the model before it runs, a feed-forward that is found out as it does."""
    stack, inputs, fusion = make_stack(), make_inputs(), make_fusion(eager_everywhere())
    run(stack, fusion, inputs)
    proven = fusion.status(stack)
    block = stack.layers[1]
    own = getattr(block, part)
    setattr(block, part, nn.Sequential(own) if part == "ffn_norm1" else Gelu(own))
    for _ in range(2):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert fusion.status(stack).startswith("stock: ") and fusion.unfused_reason(stack) is not None
    setattr(block, part, own)
    for _ in range(2):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert fusion.status(stack) == proven and fusion.unfused_reason(stack) is None
    with fusion.mounted(stack):
        assert not untouched(stack)


@pytest.mark.parametrize("part", ["feed_forward", "ffn_norm1"])
def test_a_class_exchanged_on_one_module_is_proven_anew(part: str) -> None:
    stack, inputs, fusion = make_stack(), make_inputs(), make_fusion(eager_everywhere())
    run(stack, fusion, inputs)
    module = getattr(stack.layers[1], part)
    own = type(module)
    module.__class__ = type("Doubling", (own,), {"forward": lambda self, x: 2 * own.forward(self, x)})
    for _ in range(2):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))


def test_modules_that_were_exchanged_are_let_go() -> None:
    stack, inputs, fusion = make_stack(), make_inputs(), make_fusion(eager_everywhere())
    run(stack, fusion, inputs)
    gone = weakref.ref(stack.layers[1].feed_forward)
    stack.layers[1].feed_forward = nn.Identity()
    assert fusion.status(stack) == "stock: block 1: feed_forward has no w1"
    gc.collect()
    assert gone() is None
