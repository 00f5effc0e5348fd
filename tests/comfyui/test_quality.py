"""The quality of a MODEL: isolation of clones, LoRA, interrupts, and what the status says."""

from __future__ import annotations

import dataclasses
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
from ideogram4_fusion.hosts.comfyui.load import load_diffusion_model
from ideogram4_fusion.hosts.comfyui.quality import KEY, fusion_of, set_quality, status, unfused_reason
from ideogram4_fusion.tests.comfyui.models import ON_GPU
from ideogram4_fusion.tests.comfyui.renders import render, untouched

pytestmark = pytest.mark.usefixtures("exact_on_the_cpu")


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
