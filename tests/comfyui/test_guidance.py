"""Guidance with two models: its weight in every step, when the second model runs and is loaded, what a status says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_management
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy_extras.nodes_custom_sampler import Guider_DualModel
from ideogram4_fusion.hosts.comfyui.guidance import StepGuider
from ideogram4_fusion.hosts.comfyui.quality import set_quality
from ideogram4_fusion.hosts.comfyui.sampling import make_guider, preset_sigmas, preset_status, sample
from ideogram4_fusion.sampling.presets import PRESETS, Preset
from ideogram4_fusion.sampling.schedule import sigmas
from ideogram4_fusion.tests.comfyui.models import conditioning, empty_latent, load, write_checkpoint

Calls = dict[Any, list[Any]]

SIDES = (512, 1024, 1536, 2048)

# Steps at weight 3: those of the reference, and those of ComfyUI's template at each side, which has it below sigma 0.3.
POLISHED = {"QUALITY_48": (3, (13, 7, 4, 3)), "DEFAULT_20": (2, (6, 3, 2, 2)), "TURBO_12": (1, (2, 1, 0, 0))}


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("unconditional"))


@pytest.fixture
def unconditional(other_path: Path, inference: None) -> ModelPatcher:
    return load(other_path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The contexts of all calls, by model. Seen on the class: core runs both with the wrappers of the first."""
    seen: Calls = {}
    stock = comfy.model_base.BaseModel.apply_model

    def noted(self: Any, x: Any, t: Any, c_concat: Any = None, c_crossattn: Any = None, **named: Any) -> Any:
        seen.setdefault(self, []).append(c_crossattn)
        return stock(self, x, t, c_concat, c_crossattn, **named)

    monkeypatch.setattr(comfy.model_base.BaseModel, "apply_model", noted)
    return seen


def is_loaded(model: ModelPatcher) -> bool:
    return any(
        known.model is not None and known.model.model is model.model
        for known in comfy.model_management.current_loaded_models
    )


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", POLISHED)
def test_the_weight_of_every_step_is_the_references(
    model: ModelPatcher, name: str, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset, levels = PRESETS[name], sigmas(PRESETS[name], side, side)
    used: list[float] = []
    monkeypatch.setattr(Guider_DualModel, "predict_noise", lambda self, x, t, *_: used.append(self.cfg))
    guider = make_guider(model, conditioning(), preset, levels, model)
    for level in levels[:-1]:
        guider.predict_noise(torch.zeros(1), level[None])
    assert tuple(used) == preset.guidance
    reference, template = POLISHED[name]
    assert used == [7.0] * (preset.steps - reference) + [3.0] * reference
    assert int((levels[:-1] <= 0.3).sum()) == template[SIDES.index(side)]


def test_the_unconditional_pass_is_image_only_and_weighted(
    model: ModelPatcher, unconditional: ModelPatcher, calls: Calls
) -> None:
    """Against the loop of the reference, written out: v = g cond + (1 - g) uncond, plain Euler."""
    preset, latent = PRESETS["TURBO_12"], empty_latent()
    levels = preset_sigmas(model, latent, preset)
    guider = make_guider(model, conditioning(), preset, levels, unconditional)
    found = sample(guider, levels, latent, seed=3)["samples"]
    seen, unseen = calls[model.model], calls[unconditional.model]
    assert len(seen) == len(unseen) == preset.steps
    assert all(context is not None for context in seen) and all(context is None for context in unseen)

    text = conditioning()[0][0]
    x = torch.randn(latent["samples"].shape, generator=torch.manual_seed(3)) * levels[0]
    device = model.load_device
    x = x.to(device)
    for g, level, following in zip(preset.guidance, levels[:-1], levels[1:], strict=True):
        t = level[None].to(device)
        positive = model.model.apply_model(x, t, c_crossattn=text.to(device))
        negative = unconditional.model.apply_model(x, t)
        guided = negative + g * (positive - negative)  # what the picture would be; its velocity is (x - it) / sigma
        x = x + (x - guided) / level * (following - level)
    difference = (found.to(device) - x).norm() / x.norm()
    assert difference < 0.05, difference  # bf16, and two ways to write one sum


@pytest.mark.parametrize("name", ["INSTANT_8", "FAST_20"])
def test_presets_without_guidance_never_touch_a_second_model(
    model: ModelPatcher, unconditional: ModelPatcher, name: str, calls: Calls
) -> None:
    preset, latent = PRESETS[name], empty_latent()
    levels = preset_sigmas(model, latent, preset)
    guider = make_guider(model, conditioning(), preset, levels, unconditional)
    guided = sample(guider, levels, latent, seed=3)["samples"]
    alone = sample(make_guider(model, conditioning(), preset, levels), levels, latent, seed=3)["samples"]
    assert list(calls) == [model.model] and not is_loaded(unconditional)
    assert torch.equal(guided, alone)


def test_weight_1_runs_one_model_in_a_step_and_loads_one_in_a_run(
    model: ModelPatcher, unconditional: ModelPatcher, calls: Calls
) -> None:
    latent = empty_latent()
    for guidance, expected in (((1.0, 1.0, 1.0), 0), ((1.0, 3.0, 1.0), 1)):
        preset = Preset("TRIAL", 3, 0.0, 1.75, guidance, "nobody/nothing")
        levels = preset_sigmas(model, latent, preset)
        guider = StepGuider(model, unconditional)
        guider.set_conds(conditioning(), [[None, {}]])
        guider.set_guidance(levels, guidance)
        for _ in range(2):  # a guider may be used again
            calls.clear()
            sample(guider, levels, latent, seed=3)
            assert len(calls.get(unconditional.model, [])) == expected
            assert len(calls[model.model]) == 3 and is_loaded(unconditional) == bool(expected)


def test_a_status_names_the_checkpoint_and_warns_of_a_model_in_vain(
    model: ModelPatcher, unconditional: ModelPatcher
) -> None:
    assert preset_status(PRESETS["DEFAULT_20"], unconditional) == (
        "DEFAULT_20: 18 steps at guidance 7 then 2 steps at guidance 3; "
        "made for ideogram-ai/ideogram-4-fp8, others may give poor pictures"
    )
    for name in ("INSTANT_8", "FAST_20"):
        line = preset_status(PRESETS[name])
        assert PRESETS[name].checkpoint in line and "WARNING" not in line
        assert "WARNING: the unconditional model is connected and not used" in preset_status(
            PRESETS[name], unconditional
        )


def test_two_qualities_in_one_graph_are_told(model: ModelPatcher, unconditional: ModelPatcher) -> None:
    """core runs both models with the options of the first."""
    fused, _ = set_quality(model, "lossless")
    line = preset_status(PRESETS["DEFAULT_20"], unconditional, fused)
    assert line.endswith("WARNING: both models run at the first one's fusion quality, lossless, not at off")
    both, _ = set_quality(unconditional, "lossless")
    assert "WARNING" not in preset_status(PRESETS["DEFAULT_20"], both, fused)
    assert "quality" not in preset_status(PRESETS["INSTANT_8"], unconditional, fused)
