"""Mounting: other patches and hooks, compilers, gradients and threads, and that nothing stays behind."""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from ideogram4_fusion.fusion.exchange import exchanged_forwards
from ideogram4_fusion.fusion.mount import Mount
from ideogram4_fusion.hosts.diffusers.blocks import HOST
from ideogram4_fusion.tests.fusing import Kernel, all_chains, eager_everywhere, make_fusion, run, untouched
from ideogram4_fusion.tests.stack import DEVICE, INNER, make_inputs, make_stack
from torch.overrides import TorchFunctionMode


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


def test_a_model_is_freed_without_the_collector() -> None:
    """Weights that wait for it still fill the memory while the next model loads."""
    stack, inputs, fusion = make_stack(), make_inputs(), make_fusion(eager_everywhere())
    run(stack, fusion, inputs)
    gc.collect()
    gc.disable()
    try:
        weights = weakref.ref(stack.layers[0].feed_forward)
        del stack
        assert weights() is None
    finally:
        gc.enable()


def test_a_layout_that_changes_after_the_proof_is_not_read_as_the_old_one() -> None:
    """By a hook that is known, and by one that changes its mind."""
    stack, inputs, fusion = make_stack(), make_inputs(), make_fusion(quality="high")
    turned = False
    w1 = stack.layers[0].feed_forward.w1
    run(stack, fusion, inputs)
    w1.register_forward_hook(lambda m, i, out: out.mT.contiguous().mT if turned else out)
    run(stack, fusion, inputs)
    proven = run(stack, fusion, inputs)
    turned = True
    assert torch.equal(run(stack, fusion, inputs), proven)
    assert "silu-mul" in fusion.ledger.refused


@pytest.mark.parametrize("form", ["differs", "raises"])
def test_attention_that_is_not_what_its_host_writes_out_stays_stock(form: str) -> None:
    assert HOST.attention is not None
    written = HOST.attention.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        if form == "raises":
            raise TypeError("an argument that nobody knows")
        return written(*args, **kwargs) * 1.5

    host = dataclasses.replace(HOST, attention=dataclasses.replace(HOST.attention, forward=forward))
    stack, inputs, fusion = make_stack(), make_inputs(), make_fusion(eager_everywhere(), host=host)
    for _ in range(3):
        assert torch.equal(run(stack, fusion, inputs), run(stack, None, inputs))
    assert "rope" in fusion.ledger.refused and "modulate" in fusion.ledger.proven


class _WhatW1AndW3Gave(TorchFunctionMode):
    """Notes how many of the feed-forward's inner tensors are alive whenever w2 is called."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.linear:
            return func(*args, **(kwargs or {}))
        weight = args[1]
        if weight.shape[1] == INNER:
            self.alive.append(sum(ref() is not None for ref in self.given))
            self.given.clear()
        out = func(*args, **(kwargs or {}))
        if weight.shape[0] == INNER:
            self.given.append(weakref.ref(out))
        return out


def test_what_w1_and_w3_give_is_gone_before_w2_multiplies() -> None:
    stack, inputs, fusion = make_stack(), make_inputs(), make_fusion(eager_everywhere())
    run(stack, fusion, inputs)
    with _WhatW1AndW3Gave() as seen:
        run(stack, fusion, inputs)
    assert seen.alive == [0, 0, 0]


def test_it_settles_while_no_other_thread_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a second thread had begun to compare would be taken for the first one's."""
    stack, fusion = make_stack(), make_fusion(eager_everywhere())
    settle, mounted = Mount._settle, []

    def watched(mount: Mount) -> None:
        mounted.append(not untouched(stack))
        settle(mount)

    monkeypatch.setattr(Mount, "_settle", watched)
    run(stack, fusion, make_inputs())
    assert mounted == [True]


def test_a_call_whose_first_argument_is_no_tensor_is_left_to_stock() -> None:
    stack, fusion = make_stack(), make_fusion(eager_everywhere())
    x, _, rope, adaln_input = make_inputs()
    arguments = {"attention_mask": None, "hidden_states": x, "image_rotary_emb": rope, "adaln_input": adaln_input}
    with torch.inference_mode():
        expected = stack.layers[0](**arguments)
        with fusion.mounted(stack):
            assert torch.equal(stack.layers[0](**arguments), expected)
