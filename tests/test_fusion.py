"""Mounting on diffusers' blocks: equality, the gate against wrong kernels, and that nothing stays behind."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from ideogram4_fusion.fusion.chains import Chain, load_chains
from ideogram4_fusion.fusion.exchange import exchanged_forwards
from ideogram4_fusion.fusion.fusion import Fusion
from ideogram4_fusion.hosts.diffusers.blocks import HOST
from ideogram4_fusion.tests.stack import DEVICE, Stack, make_inputs, make_stack
from torch import nn

CHAINS = ("modulate", "gate", "gate+modulate", "silu-mul", "rope")


Kernel = Callable[..., Any]


def all_chains() -> dict[str, Chain]:
    """Those of every host, and the rope of this one."""
    assert HOST.attention is not None
    return {**load_chains(), "rope": HOST.attention.rope()}


def make_fusion(kernels: Mapping[str, Kernel] | None = None, quality: str = "lossless") -> Fusion:
    """A Fusion whose named chains have a kernel of the test's."""
    chains = all_chains()
    for name, fused in (kernels or {}).items():
        chains[name] = dataclasses.replace(chains[name], fused=fused, inexact=lambda device: None)
    return Fusion(quality, HOST, torch.device(DEVICE), chains=chains)


def eager_everywhere() -> dict[str, Kernel]:
    """Stands in for kernels where a test is about mounting: equal on the CPU too, whose sums have another order."""
    return {name: chain.eager for name, chain in all_chains().items()}


@torch.inference_mode()
def run(stack: Stack, fusion: Fusion | None, inputs: tuple[object, ...]) -> torch.Tensor:
    if fusion is None:
        return stack(*inputs)
    with fusion.mounted(stack):
        return stack(*inputs)


def untouched(stack: nn.Module) -> bool:
    return not any("forward" in module.__dict__ for module in stack.modules())


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
    assert f"silu-mul fused (3 of {3 * 37 * 256:,} values differed in the first forward)" in fusion.status(stack)


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


def test_another_patch_keeps_its_module_and_the_rest_is_fused() -> None:
    stack, inputs = make_stack(), make_inputs()
    fusion = make_fusion(eager_everywhere())
    layer = stack.layers[1].feed_forward
    patched = type(layer).forward.__get__(layer)
    with exchanged_forwards({layer: lambda x: 2 * patched(x)}):
        expected = run(stack, None, inputs)
        for _ in range(2):
            assert torch.equal(run(stack, fusion, inputs), expected)
        assert "silu-mul stock (another node patched" in fusion.status(stack)
        assert "modulate, gate, gate+modulate, rope exact" in fusion.status(stack)
    for _ in range(2):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert "silu-mul" in fusion.ledger.proven


def test_a_hooked_norm_still_sees_its_tensor() -> None:
    stack, inputs = make_stack(), make_inputs()
    fusion = make_fusion(eager_everywhere())
    seen: list[torch.Tensor] = []
    stack.layers[0].ffn_norm1.register_forward_hook(lambda _, args, out: seen.append(out))
    for _ in range(2):
        run(stack, fusion, inputs)
    assert len(seen) == 2
    assert "modulate, gate, gate+modulate stock (another node patched" in fusion.status(stack)


def test_torch_compile_traces_the_hosts_own_chain() -> None:
    stack, inputs = make_stack(), make_inputs()
    stock = run(stack, None, inputs)
    kernels: list[str] = []

    def recorded(name: str, eager: Kernel) -> Kernel:
        def fused(*args: object) -> torch.Tensor:
            kernels.append(name)
            return eager(*args)

        return fused

    chains = {name: recorded(name, chain.eager) for name, chain in all_chains().items()}
    fusion = make_fusion(chains)
    compiled = torch.compile(stack, backend="eager")
    for _ in range(2):
        with torch.inference_mode(), fusion.mounted(stack):
            assert torch.equal(compiled(*inputs), stock)
    assert not kernels


def test_gradients_take_the_hosts_own_chain() -> None:
    stack, (x, *rest) = make_stack(), make_inputs()
    fusion = make_fusion(eager_everywhere())
    run(stack, fusion, (x, *rest))
    x = x.clone().requires_grad_()
    with fusion.mounted(stack):
        stack(x, *rest).float().sum().backward()
    ours = x.grad.clone()
    x.grad = None
    stack(x, *rest).float().sum().backward()
    assert torch.equal(ours, x.grad)


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


@pytest.mark.parametrize("shape", [(1, 0), (0, 37)])
def test_nothing_is_proven_by_no_values(shape: tuple[int, int]) -> None:
    stack = make_stack()
    wrong = make_fusion(eager_everywhere() | {"silu-mul": lambda a, b: all_chains()["silu-mul"].eager(a, b) + 1})
    run(stack, wrong, make_inputs(*shape))
    inputs = make_inputs(max(shape[0], 2), 37)
    assert torch.equal(run(stack, wrong, inputs), run(stack, None, inputs))


def test_autocast_is_left_to_stock() -> None:
    stack, inputs = make_stack(), make_inputs()
    fusion = make_fusion(eager_everywhere())
    run(stack, fusion, inputs)
    with torch.autocast(DEVICE, torch.float16):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))


def test_parameters_that_want_gradients_get_them() -> None:
    stack, inputs = make_stack(), make_inputs()
    fusion = make_fusion(eager_everywhere())
    run(stack, fusion, inputs)
    stack.requires_grad_(True)
    with fusion.mounted(stack):
        stack(*inputs).float().sum().backward()
    assert all(p.grad is not None for p in stack.layers.parameters())


def test_threads_share_a_model_and_leave_it_clean() -> None:
    stack, inputs = make_stack(), make_inputs()
    stock, wrong, interval = run(stack, None, inputs), [], sys.getswitchinterval()

    def render() -> None:
        fusion = make_fusion(eager_everywhere())
        for _ in range(15):
            if not torch.equal(run(stack, fusion, inputs), stock):
                wrong.append(1)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=render) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong and untouched(stack)


def test_a_site_kept_beyond_its_call_runs_stock() -> None:
    stack, inputs = make_stack(), make_inputs()
    fusion = make_fusion(eager_everywhere())
    stock = run(stack, None, inputs)
    with fusion.mounted(stack):
        kept = [layer.forward for layer in stack.layers]
    with exchanged_forwards(dict(zip(stack.layers, kept, strict=True))):
        assert torch.equal(run(stack, None, inputs), stock)


def test_self_test_judges_before_the_first_image() -> None:
    stack = make_stack()
    fusion = make_fusion(eager_everywhere() | {"gate": full_of_nan(all_chains()["gate"].eager)})
    fusion.self_test(stack)
    said = fusion.status(stack)
    assert said.startswith("lossless: 3/3 blocks; modulate, gate+modulate, silu-mul exact; ")
    assert "; rope to be proven on the first step; gate stock (" in said


def test_no_such_quality() -> None:
    with pytest.raises(ValueError, match="neither lossless nor high"):
        Fusion("off", HOST, torch.device(DEVICE))
