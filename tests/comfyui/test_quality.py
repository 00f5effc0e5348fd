"""The quality of a MODEL: isolation of clones, LoRA, interrupts, other patches, and what the status says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.ldm.ideogram4.model
import comfy.ldm.modules.attention
import comfy.model_management
import comfy.ops
import comfy.quant_ops
import ideogram4_fusion.fusion.fusion
import ideogram4_fusion.hosts.comfyui.quality
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from ideogram4_fusion.fusion.chains import load_chains
from ideogram4_fusion.hosts.comfyui.blocks import HOST
from ideogram4_fusion.hosts.comfyui.load import load_diffusion_model
from ideogram4_fusion.hosts.comfyui.quality import KEY, fusion_of, set_quality, status, unfused_reason
from ideogram4_fusion.hosts.comfyui.sampling import make_guider, preset_sigmas, sample
from ideogram4_fusion.sampling.presets import PRESETS
from ideogram4_fusion.tests.comfyui.models import ON_GPU, conditioning, empty_latent, load, write_checkpoint

PRESET = PRESETS["INSTANT_8"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    with torch.inference_mode():
        render(load(path))  # stock's first forward in a process need not repeat itself
    return path


@pytest.fixture(autouse=True)
def exact_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no GPU is, eager forms stand in for the kernels: these tests are about mounting, and the interpreter's row
    sums are not the CPU's."""
    if not torch.cuda.is_available():
        eager = {
            name: dataclasses.replace(chain, fused=chain.eager, inexact=lambda device: None)
            for name, chain in load_chains().items()
        }
        monkeypatch.setattr(ideogram4_fusion.fusion.fusion, "load_chains", lambda: eager)
        assert HOST.attention is not None
        rope = HOST.attention.rope()
        stock = dataclasses.replace(rope, fused=rope.eager, inexact=lambda device: None)
        form = dataclasses.replace(HOST.attention, rope=lambda: stock)
        host = dataclasses.replace(HOST, attention=form)
        monkeypatch.setattr(ideogram4_fusion.hosts.comfyui.quality, "HOST", host)


@pytest.fixture
def model(path: Path, inference: None) -> ModelPatcher:
    return load(path)


def render(model: ModelPatcher, on_step: Callable[[int], None] | None = None) -> torch.Tensor:
    levels = preset_sigmas(model, empty_latent(), PRESET)[[0, 4, 8]]
    guider = make_guider(model, conditioning(), PRESET, levels)
    return sample(guider, levels, empty_latent(), seed=3, on_step=on_step)["samples"]


def untouched(model: ModelPatcher) -> bool:
    return not any("forward" in module.__dict__ for module in model.model.diffusion_model.modules())


def test_off_returns_the_model_it_was_given(model: ModelPatcher) -> None:
    assert set_quality(model, "off")[0] is model


def test_off_takes_a_fusion_away_and_leaves_the_other_clone_alone(model: ModelPatcher) -> None:
    fused, _ = set_quality(model, "lossless")
    plain, said = set_quality(fused, "off")
    assert plain is not fused and fusion_of(plain) is None and fusion_of(fused) is not None
    assert said == "off: stock"


def test_the_last_of_several_quality_nodes_wins(model: ModelPatcher) -> None:
    both, _ = set_quality(set_quality(model, "lossless")[0], "high")
    assert len(both.get_wrappers(WrappersMP.APPLY_MODEL, KEY)) == 1
    assert status(both).startswith("high: ")


def test_unknown_quality(model: ModelPatcher) -> None:
    with pytest.raises(ValueError, match="none of off, lossless, high"):
        set_quality(model, "best")


def test_stock_fused_stock(model: ModelPatcher) -> None:
    """The picture of the plain model is the same before and after its fused clone ran."""
    stock = render(model)
    fused, _ = set_quality(model, "lossless")
    assert torch.equal(render(fused), stock)
    assert torch.equal(render(model), stock)
    assert untouched(model)


def test_the_proof_is_made_once(model: ModelPatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that core does to a model between calls and between renders makes it look exchanged."""
    chains = dict(ideogram4_fusion.fusion.fusion.load_chains())
    calls: list[int] = []

    def counted(*args: Any, **more: Any) -> Any:
        calls.append(1)
        return chains["silu-mul"].eager(*args, **more)

    counting = {**chains, "silu-mul": dataclasses.replace(chains["silu-mul"], eager=counted)}
    monkeypatch.setattr(ideogram4_fusion.fusion.fusion, "load_chains", lambda: counting)
    fused, _ = set_quality(model, "lossless")
    calls.clear()
    blocks = len(model.model.diffusion_model.layers)
    for _ in range(3):
        render(fused)
        render(model)
        assert len(calls) == blocks


def test_lora_changes_fused_and_stock_alike(model: ModelPatcher) -> None:
    """Patches on a Linear, on a norm's weight and on the modulation."""
    stock = render(model)
    generator = torch.Generator().manual_seed(5)
    weights = model.model.diffusion_model.state_dict()
    patched = model.clone()
    for name in ("attention.qkv", "ffn_norm1", "adaln_modulation", "feed_forward.w2"):
        shape = weights[f"layers.1.{name}.weight"].shape
        delta = torch.randn(shape, generator=generator) * 0.2
        assert patched.add_patches({f"diffusion_model.layers.1.{name}.weight": ("diff", (delta,))}, 1.0)
    changed = render(patched)
    assert not torch.equal(changed, stock)
    fused, _ = set_quality(patched, "lossless")
    assert torch.equal(render(fused), changed)
    assert torch.equal(render(set_quality(model, "lossless")[0]), stock)


def test_cancel_in_the_first_and_in_a_later_step(model: ModelPatcher) -> None:
    stock = render(model)
    fused, _ = set_quality(model, "lossless")
    for cancelled in (0, 1):

        def cancel(step: int, at: int = cancelled) -> None:
            if step == at:
                comfy.model_management.interrupt_current_processing()
                comfy.model_management.throw_exception_if_processing_interrupted()

        with pytest.raises(comfy.model_management.InterruptProcessingException):
            render(fused, on_step=cancel)
        assert untouched(model)
    assert torch.equal(render(fused), stock)


def test_cancel_inside_a_block(model: ModelPatcher) -> None:
    """core checks for a cancel in every Linear: the forwards are put back from the middle of a forward too."""
    stock = render(model)
    fused, _ = set_quality(model, "lossless")

    def cancel(*_: object) -> None:
        comfy.model_management.interrupt_current_processing()

    handle = model.model.diffusion_model.layers[1].feed_forward.w1.register_forward_pre_hook(cancel)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        render(fused)
    handle.remove()
    assert untouched(model)
    assert torch.equal(render(fused), stock)


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
        layer.attention.comfy_attention = "preference"
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


def test_torch_compile_traces_stock_and_the_status_says_so(model: ModelPatcher) -> None:
    """core's own compile helper, whichever of the two nodes comes first."""
    pytest.importorskip("av")  # the helper lies in comfy_api, which needs all of ComfyUI's packages
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    fused, _ = set_quality(model, "lossless")
    set_torch_compile_wrapper(fused, backend="eager")
    plain = model.clone()
    set_torch_compile_wrapper(plain, backend="eager")
    assert torch.equal(render(fused), render(plain))
    assert status(fused) == "stock: torch.compile is on this model, and traces the stock chains"
    assert status(set_quality(plain, "high")[0]) == status(fused) and untouched(model)


def test_status_is_told_again_when_sampling_changes_it(model: ModelPatcher) -> None:
    told: list[str] = []
    fused, _ = set_quality(model, "lossless", told.append)
    render(fused)
    assert told and told[-1] == status(fused) and "silu-mul" in told[-1] and "stock" not in told[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in bf16")
def test_fp32_compute_stays_stock_and_says_so(path: Path, inference: None) -> None:
    model = load_diffusion_model(path)
    fused, said = set_quality(model, "lossless")
    assert said == "stock: the model computes in float32 here, the kernels in bfloat16"
    assert torch.equal(render(fused), render(model))
    assert unfused_reason(fused) == said.removeprefix("stock: ")


@pytest.mark.skipif(not ON_GPU, reason="no fp8 hardware")
def test_core_quantises_every_bf16_value_as_the_kernel_does(inference: None) -> None:
    """NaN too, which both turn into the largest negative value."""
    from ideogram4_fusion.hosts.comfyui.fp8 import EMISSION
    from ideogram4_fusion.kernels.quantise import quantise

    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).cuda()
    assert torch.equal(EMISSION.quantise(every).view(torch.uint8), quantise(every).view(torch.uint8))


@pytest.mark.skipif(not ON_GPU, reason="no fp8 hardware")
def test_a_product_that_fails_is_left_to_core(model: ModelPatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    from ideogram4_fusion.hosts.comfyui import fp8

    fused, _ = set_quality(model, "lossless")
    stock = render(model)
    assert torch.equal(render(fused), stock)
    failed: list[int] = []

    def fail(*_: Any, **__: Any) -> None:
        failed.append(1)
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(fp8, "scaled_mm_v2", fail)
    assert torch.equal(render(fused), stock)
    assert failed and "fp8 input exact" in status(fused)
