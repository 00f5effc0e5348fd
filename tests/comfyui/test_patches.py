"""What other packs, and newer cores, put on a MODEL: left to them, and said in the status."""

from __future__ import annotations

from typing import Any

import comfy.ldm.ideogram4.model
import comfy.ldm.modules.attention
import comfy.ops
import comfy.quant_ops
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from ideogram4_fusion.hosts.comfyui.quality import set_quality, status
from ideogram4_fusion.tests.comfyui.renders import render

pytestmark = pytest.mark.usefixtures("exact_on_the_cpu")


def test_a_patched_feed_forward_is_left_to_its_patch(model: ModelPatcher) -> None:
    """As KJNodes patches it: an object patch on feed_forward.forward."""
    feed_forward = model.get_model_object("diffusion_model.layers.0.feed_forward")
    stock = type(feed_forward).forward.__get__(feed_forward)
    patched = model.clone()
    patched.add_object_patch("diffusion_model.layers.0.feed_forward.forward", lambda x: 0.5 * stock(x))
    fused, said = set_quality(patched, "lossless")
    assert "silu-mul stock (another node patched it)" in said
    halved = render(patched)
    assert torch.equal(render(fused), halved)
    plain = render(model)
    assert not torch.equal(halved, plain)
    # core leaves a bound copy of the stock forward on the module when it takes the patch off; that is no patch.
    again, _ = set_quality(model, "lossless")
    assert torch.equal(render(again), plain)
    assert "stock" not in status(again)


@pytest.mark.parametrize(
    ("where", "aside"),
    [
        ("", "modulate, gate, gate+modulate stock (another node patched it)"),
        ("ffn_norm1.", "modulate, gate, gate+modulate stock (another node patched it)"),
        ("attention.", "rope stock (another node patched it)"),
    ],
)
def test_a_status_names_all_that_a_patch_takes_away(model: ModelPatcher, where: str, aside: str) -> None:
    """Before it is loaded, and without what another clone has left on the shared module."""
    path = f"diffusion_model.layers.1.{where}".removesuffix(".")
    module = model.get_model_object(path)
    stock = type(module).forward.__get__(module)
    patched = model.clone()
    patched.add_object_patch(f"{path}.forward", lambda *args, **named: stock(*args, **named))
    _, said = set_quality(patched, "lossless")
    assert aside in said
    render(patched)  # and leaves its patch on the module
    _, other = set_quality(model, "lossless")
    assert "patched" not in other


def test_a_forward_exchanged_on_the_module_itself_is_told(model: ModelPatcher) -> None:
    """As packs do that know no object patches: no MODEL says so, only the module."""
    feed_forward = model.model.diffusion_model.layers[1].feed_forward
    stock = type(feed_forward).forward.__get__(feed_forward)
    feed_forward.forward = lambda x: stock(x)
    try:
        fused, said = set_quality(model, "lossless")
        assert "silu-mul stock (another node patched FeedForward)" in said
        render(fused)
        assert "silu-mul stock (another node patched FeedForward)" in status(fused)
    finally:
        del feed_forward.forward


def test_a_patched_attention_is_called_as_core_calls_it(model: ModelPatcher) -> None:
    """A patch may know attention's arguments under names of its own: core hands them on by position."""
    attention = model.get_model_object("diffusion_model.layers.1.attention")
    stock = type(attention).forward.__get__(attention)

    def patch(h: Any, mask: Any, rotation: Any, transformer_options: Any) -> torch.Tensor:
        return 0.5 * stock(h, mask, rotation, transformer_options=transformer_options)

    patched = model.clone()
    patched.add_object_patch("diffusion_model.layers.1.attention.forward", patch)
    halved = render(patched)
    fused, _ = set_quality(patched, "lossless")
    assert torch.equal(render(fused), halved)
    assert "modulate, gate, gate+modulate, silu-mul" in status(fused)


class Container:
    """What newer cores hand to attention in place of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_attention_of_newer_cores(model: ModelPatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """They put q, k and v into containers and hand on a preference of the module: so must the written-out attention."""
    core = comfy.ldm.ideogram4.model
    attend = core.optimized_attention_masked
    seen: list[str] = []

    def newer(q: Any, k: Any, v: Any, *args: Any, preferred_attention: str, **kwargs: Any) -> torch.Tensor:
        seen.append(preferred_attention)
        return attend(q.tensor, k.tensor, v.tensor, *args, **kwargs)

    def forward(self: Any, x: Any, attn_mask: Any, freqs_cis: Any, transformer_options: Any = None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(dim=2)
        scales = [comfy.ops.cast_to_input(norm.weight, q) for norm in (self.norm_q, self.norm_k)]
        q, k = comfy.quant_ops.ck.rms_rope_split_half(q, k, freqs_cis, *scales, self.norm_q.eps)
        heads = [core.AttentionTensorContainer(part.transpose(1, 2)) for part in (q, k, v)]
        options = {"skip_reshape": True, "preferred_attention": self.comfy_attention}
        out = core.optimized_attention_masked(
            *heads, self.num_heads, attn_mask, transformer_options=transformer_options, **options
        )
        return self.o(out)

    monkeypatch.setattr(core, "AttentionTensorContainer", Container, raising=False)
    monkeypatch.setattr(core, "optimized_attention_masked", newer)
    monkeypatch.setattr(core.Ideogram4Attention, "forward", forward)
    for layer in model.model.diffusion_model.layers:
        # Newer cores have a module there, in whose place `setattr` takes nothing else.
        object.__setattr__(layer.attention, "comfy_attention", "preference")
    stock = render(model)
    fused, _ = set_quality(model, "lossless")
    seen.clear()
    assert torch.equal(render(fused), stock)
    assert set(seen) == {"preference"} and "rope" in status(fused).split(" exact")[0]


def test_another_wrapper_and_an_attention_override_still_run(model: ModelPatcher) -> None:
    calls: list[str] = []

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("wrapper")
        return executor(*args, **kwargs)

    def override(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append("attention")
        return comfy.ldm.modules.attention.optimized_attention_masked(*args, **kwargs)

    other = model.clone()
    other.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "other", wrapper)
    other.set_model_optimized_attention(override)
    expected = render(other)
    stock_calls = list(calls)
    calls.clear()
    assert torch.equal(render(set_quality(other, "lossless")[0]), expected)
    assert calls == stock_calls
