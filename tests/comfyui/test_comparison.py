"""The comparison in the real core: the verdicts that it can come to, and that it is fair to both sides."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ideogram4_fusion.fusion.fusion
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from ideogram4_fusion.comparison.report import text
from ideogram4_fusion.fusion import proof
from ideogram4_fusion.fusion.chains import load_chains
from ideogram4_fusion.fusion.self_test import TOKENS
from ideogram4_fusion.hosts.comfyui.comparison import Comparison, compare_qualities
from ideogram4_fusion.hosts.comfyui.quality import fusion_of, set_quality
from ideogram4_fusion.hosts.comfyui.sampling import MissingUnconditional
from ideogram4_fusion.sampling.presets import PRESETS
from ideogram4_fusion.tests.comfyui.models import conditioning, empty_latent, load, write_checkpoint
from ideogram4_fusion.tests.comfyui.wrong_kernels import replace_kernel


class StandInVAE:
    """Decodes by showing three of the latent's channels, 16 times as large."""

    def decode(self, samples: torch.Tensor) -> torch.Tensor:
        images = samples[:, :3].movedim(1, -1).sigmoid()
        return images.repeat_interleave(16, dim=1).repeat_interleave(16, dim=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelPatcher:
    with torch.inference_mode():
        return load(write_checkpoint(tmp_path_factory.mktemp("checkpoint")))


def compare(model: ModelPatcher, a: str, b: str, preset: str = "INSTANT_8", **more: Any) -> Comparison:
    with torch.inference_mode():
        return compare_qualities(
            model, conditioning(), empty_latent(2), StandInVAE(), PRESETS[preset], 7, (a, b), **more
        )


@pytest.mark.parametrize("preset", ["INSTANT_8", "FAST_20"])
def test_off_and_lossless_are_identical(model: ModelPatcher, preset: str) -> None:
    result = compare(model, "off", "lossless", preset)
    side = result.image_a.shape[1]
    assert result.report.verdict == (
        f"IDENTICAL: 0 of {2 * side * side * 3:,} pixel values and 0 of {2 * 128 * (side // 16) ** 2:,} latent values "
        f"differ"
    )
    assert "PSNR: inf (identical)" in text(result.report) and result.gain == 1
    steps = PRESETS[preset].steps
    assert len(result.report.a.seconds_per_step) == len(result.report.b.seconds_per_step) == steps - 1
    assert result.report.a.status == "off: stock" and "silu-mul exact" in result.report.b.status
    assert (result.report.width, result.report.height, result.report.seed) == (side, side, 7)


def test_a_kernel_that_differs_is_close_in_high(model: ModelPatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = load_chains()["silu-mul"].eager
    replace_kernel(monkeypatch, "silu-mul", lambda *args: eager(*args) * 1.01)
    result = compare(model, "off", "high")
    assert result.report.verdict.startswith("CLOSE: ") and "dB" in result.report.verdict
    assert result.gain >= 1 and result.report.latents is not None and result.report.latents.differing > 0
    assert "values differed" in result.report.b.status


def test_a_result_under_the_bar_fails_in_words(model: ModelPatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel so far off would be refused; here nothing refuses it."""
    monkeypatch.setattr(proof, "FARTHEST", math.inf)
    eager = load_chains()["silu-mul"].eager
    replace_kernel(monkeypatch, "silu-mul", lambda *args: -100 * eager(*args))
    verdict = compare(model, "off", "high").report.verdict
    assert verdict.startswith("NOT CLOSE: ") and verdict.endswith("which fails the bar of 25 dB")


def test_the_same_wrong_kernel_is_identical_in_lossless(model: ModelPatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = load_chains()["silu-mul"].eager
    replace_kernel(monkeypatch, "silu-mul", lambda *args: eager(*args) * 1.01)
    result = compare(model, "off", "lossless")
    assert result.report.latents is not None and result.report.latents.differing == 0
    assert "silu-mul stock (" in result.report.b.status


def test_non_finite_pixels_are_reported_first(model: ModelPatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = load_chains()["gate"].eager
    calls = itertools.count()
    # Right for as long as it is compared, in the warm-up.
    replace_kernel(monkeypatch, "gate", lambda *args: eager(*args) * (1.0 if next(calls) < 20 else torch.nan))
    assert compare(model, "off", "high").report.verdict.startswith("NOT COMPARED: non-finite pixels in B")


def test_nothing_fused_is_no_comparison(model: ModelPatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ideogram4_fusion.fusion.fusion, "unavailable", lambda device: "Triton is not installed")
    report = compare(model, "lossless", "high").report
    assert report.verdict == "NOT COMPARED: nothing was fused (Triton is not installed)"
    assert "stock: Triton is not installed" in text(report)


def test_it_sets_both_sides_itself(model: ModelPatcher) -> None:
    """A quality node in front of it changes nothing, and keeps its own fusion."""
    fused, _ = set_quality(model, "high")
    before = fusion_of(fused)
    assert compare(fused, "off", "off").report.verdict.startswith("IDENTICAL")
    assert fusion_of(fused) is before


def test_a_guided_preset_wants_the_second_model(model: ModelPatcher) -> None:
    with pytest.raises(MissingUnconditional, match="TURBO_12 guides with the unconditional"):
        compare(model, "off", "lossless", "TURBO_12")


@pytest.mark.parametrize("wrong", [False, True])
def test_a_guided_preset_with_both_models(
    model: ModelPatcher, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    """What is said of both is of the one Fusion that core runs them with, be its kernel wrong after the self-test."""
    pytest.importorskip("av")  # core's two-model guider lies in a module that needs all of ComfyUI's packages
    eager = load_chains()["silu-mul"].eager

    def wrong_for_few(*args: Any) -> torch.Tensor:
        out: torch.Tensor = eager(*args)
        return out + 1 if out.shape[-2] < TOKENS else out

    if wrong:
        replace_kernel(monkeypatch, "silu-mul", wrong_for_few)
    with torch.inference_mode():
        unconditional = load(write_checkpoint(tmp_path))
    report = compare(model, "off", "lossless", "TURBO_12", unconditional=unconditional).report
    assert report.latents is not None and report.latents.differing == 0
    assert wrong or report.verdict.startswith("IDENTICAL")
    first, second = report.b.status.split(" | unconditional: ")
    assert first == second and first.startswith("lossless: 3/3 blocks") and ("values differ" in first) == wrong
