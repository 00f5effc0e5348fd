"""Text features converted once before the first step, where nobody stands between them and the model."""

from __future__ import annotations

import types
from typing import Any

import comfy.hooks
import comfy.model_base
import comfy.model_management
import pytest
import torch
from comfy.conds import CONDRegular
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP, add_wrapper_with_key
from ideogram4_fusion.hosts.comfyui.quality import set_quality
from ideogram4_fusion.hosts.comfyui.sampling import find_preset, make_guider, preset_sigmas, sample
from ideogram4_fusion.hosts.comfyui.text_features import TextFeaturesOnDevice
from ideogram4_fusion.tests.comfyui.models import ON_GPU, conditioning, empty_latent, load, write_checkpoint

PRESET = find_preset("INSTANT_8")
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelPatcher:
    return load(write_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The text features that core's BaseModel is given, one a step."""
    seen: list[torch.Tensor] = []
    stock = comfy.model_base.BaseModel._apply_model

    def apply(
        self: Any, x: Any, t: Any, c_concat: Any = None, c_crossattn: Any = None, *args: Any, **named: Any
    ) -> Any:
        seen.append(c_crossattn)
        return stock(self, x, t, c_concat, c_crossattn, *args, **named)

    monkeypatch.setattr(comfy.model_base.BaseModel, "_apply_model", apply)
    return seen


def render(model: ModelPatcher, batch: int = 1, masked: bool = False) -> torch.Tensor:
    latent = empty_latent(batch)
    levels = preset_sigmas(model, latent, PRESET)
    levels = torch.cat((levels[:STEPS], levels[-1:]))
    guider = make_guider(model, conditioning(masked), PRESET, levels)
    return sample(guider, levels, latent, seed=3)["samples"]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_the_model_is_given_the_same_values_converted(
    inference: None, model: ModelPatcher, given: list[torch.Tensor], batch: int, masked: bool
) -> None:
    render(model)  # the very first forward of a process may differ
    given.clear()
    stock = render(model, batch, masked)
    before = list(given)
    given.clear()
    fused, _ = set_quality(model, "lossless")
    assert torch.equal(render(fused, batch, masked), stock)
    assert len(before) == len(given) == STEPS
    device = torch.device(model.load_device)
    for theirs, ours in zip(before, given, strict=True):
        assert theirs.dtype == torch.float32 and theirs.device.type == "cpu"
        assert ours.dtype == torch.bfloat16 and ours.device.type == device.type
        assert torch.equal(theirs.to(device, torch.bfloat16), ours)
    if batch == 1:
        assert len({ours.data_ptr() for ours in given}) == 1, "no copy a step"


def test_conditionings_on_two_devices_are_left_to_core() -> None:
    """core batches what lies on one device; brought together they would be batched, and so computed, otherwise."""

    def conds(device: str) -> list[dict[str, Any]]:
        return [{"model_conds": {"c_crossattn": CONDRegular(torch.zeros(1, 4, 8, device=device))}}]

    given: list[Any] = []

    def executor(guider: Any, *_: Any) -> None:
        given.append(guider.conds)

    patcher = types.SimpleNamespace(load_device=torch.device("cpu"))
    inner = types.SimpleNamespace(get_dtype_inference=lambda: torch.bfloat16)
    for devices, left in ((("cpu", "meta"), True), (("cpu", "cpu"), False)):
        stock = {name: conds(device) for name, device in zip(("positive", "negative"), devices, strict=True)}
        guider = types.SimpleNamespace(conds=stock, model_patcher=patcher, inner_model=inner)
        TextFeaturesOnDevice("key")(executor, guider, None, {})
        assert (given.pop() is stock) == left and guider.conds is stock


def test_the_callers_conditioning_stays_as_it_is(inference: None, model: ModelPatcher) -> None:
    fused, _ = set_quality(model, "high")
    latent, positive = empty_latent(), conditioning()
    levels = preset_sigmas(fused, latent, PRESET)[-2:]
    sample(make_guider(fused, positive, PRESET, levels), levels, latent, seed=3)
    assert positive[0][0].dtype == torch.float32 and positive[0][0].device.type == "cpu"


KINDS = [
    *(WrappersMP.SAMPLER_SAMPLE, WrappersMP.PREDICT_NOISE, WrappersMP.CALC_COND_BATCH),
    *(WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL),
]


@pytest.mark.parametrize("kind", KINDS)
def test_another_packs_wrapper_sees_what_core_hands_on(
    inference: None, model: ModelPatcher, given: list[torch.Tensor], kind: str
) -> None:
    fused, _ = set_quality(model, "lossless")
    fused.add_wrapper_with_key(kind, "another pack", lambda executor, *args, **named: executor(*args, **named))
    render(fused)
    assert {features.dtype for features in given} == {torch.float32}


def test_a_function_around_the_model_sees_what_core_hands_on(
    inference: None, model: ModelPatcher, given: list[torch.Tensor]
) -> None:
    fused, _ = set_quality(model, "lossless")
    fused.set_model_unet_function_wrapper(lambda apply, call: apply(call["input"], call["timestep"], **call["c"]))
    render(fused)
    assert {features.dtype for features in given} == {torch.float32}


def test_a_guidance_function_sees_what_core_hands_on(
    inference: None, model: ModelPatcher, given: list[torch.Tensor]
) -> None:
    fused, _ = set_quality(model, "lossless")
    fused.set_model_sampler_post_cfg_function(lambda call: call["denoised"])
    render(fused)
    assert {features.dtype for features in given} == {torch.float32}


def test_a_hook_of_the_conditioning_sees_what_core_hands_on(
    inference: None, model: ModelPatcher, given: list[torch.Tensor]
) -> None:
    """core brings a hook's wrappers in during the step, behind everyone who looked before."""
    seen: list[torch.dtype] = []

    def wrapper(executor: Any, x: Any, t: Any, c_concat: Any, c_crossattn: Any, *rest: Any, **named: Any) -> Any:
        seen.append(c_crossattn.dtype)
        return executor(x, t, c_concat, c_crossattn * 1.1, *rest, **named)

    options: dict[str, Any] = {}
    add_wrapper_with_key(WrappersMP.APPLY_MODEL, "hook", wrapper, options)
    pictures = []
    for quality in ("off", "lossless"):
        hooks = comfy.hooks.HookGroup()
        hooks.add(comfy.hooks.TransformerOptionsHook(options, comfy.hooks.EnumHookScope.HookedOnly))
        positive = comfy.hooks.set_hooks_for_conditioning(conditioning(), hooks)
        fused, _ = set_quality(model, quality)
        comfy.hooks.create_transformer_options_from_hooks(fused, hooks)
        levels = preset_sigmas(fused, empty_latent(), PRESET)[-3:]
        pictures.append(sample(make_guider(fused, positive, PRESET, levels), levels, empty_latent(), 3)["samples"])
    assert torch.equal(*pictures)
    assert set(seen) == {torch.float32}


def test_a_model_that_writes_into_them_is_sampled_again_as_core_does(
    inference: None, model: ModelPatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core that did so on its own copy would get other features in each step."""
    stock = comfy.model_base.BaseModel._apply_model
    width = model.model.diffusion_model.llm_cond_norm.normalized_shape[0]

    def writing(self: Any, x: Any, t: Any, c_concat: Any, c_crossattn: Any, *rest: Any, **named: Any) -> Any:
        out = stock(self, x, t, c_concat, c_crossattn, *rest, **named)
        assert c_crossattn.shape[-1] == width
        c_crossattn.mul_(1.5)
        return out

    monkeypatch.setattr(comfy.model_base.BaseModel, "_apply_model", writing)
    expected = render(model)
    fused, _ = set_quality(model, "lossless")
    for _ in range(2):
        assert torch.equal(render(fused), expected)


def test_a_run_cut_short_keeps_no_converted_features(inference: None, model: ModelPatcher) -> None:
    fused, _ = set_quality(model, "lossless")
    levels = preset_sigmas(fused, empty_latent(), PRESET)[-3:]
    guider = make_guider(fused, conditioning(), PRESET, levels)

    def interrupt(step: int) -> None:
        raise comfy.model_management.InterruptProcessingException

    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(guider, levels, empty_latent(), 3, on_step=interrupt)
    features = guider.conds["positive"][0]["model_conds"]["c_crossattn"].cond
    assert features.dtype == torch.float32 and features.device.type == "cpu"


def test_off_leaves_it_to_core(inference: None, model: ModelPatcher, given: list[torch.Tensor]) -> None:
    fused, _ = set_quality(model, "lossless")
    off, _ = set_quality(fused, "off")
    render(off)
    assert {features.dtype for features in given} == {torch.float32}


@pytest.mark.skipif(not ON_GPU, reason="PyTorch counts the memory of GPUs alone")
def test_a_small_picture_takes_no_more_memory_than_stock(inference: None, model: ModelPatcher) -> None:
    """At 256 x 256 pixels the text features are the largest tensors of a step."""
    fused, _ = set_quality(model, "lossless")
    peaks = []
    for side in (model, fused):
        for _ in range(2):  # the first compares
            torch.cuda.reset_peak_memory_stats()
            latent = empty_latent(cells=16)
            levels = preset_sigmas(side, latent, PRESET)[-3:]
            sample(make_guider(side, conditioning(), PRESET, levels), levels, latent, 3)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= peaks[0]
