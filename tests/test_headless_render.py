"""Rendering with diffusers' pipeline: how often the transformer runs, what seeds decide, and stock against fused."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from ideogram4_fusion.checkpoint.folder import open_folder
from ideogram4_fusion.comparison.metrics import differing_values
from ideogram4_fusion.fusion.fusion import HIGH, LOSSLESS
from ideogram4_fusion.hosts.diffusers.compare import compare_qualities
from ideogram4_fusion.hosts.diffusers.conditioning import Conditioning, encode
from ideogram4_fusion.hosts.diffusers.load import Models, load_models
from ideogram4_fusion.hosts.diffusers.render import Renderer, Rendering
from ideogram4_fusion.hosts.diffusers.settings import Settings, SettingsError
from ideogram4_fusion.sampling.presets import PRESETS, Preset
from ideogram4_fusion.sampling.schedule import sigmas
from ideogram4_fusion.tests.tiny_checkpoint import write_tiny_checkpoint
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
SETTINGS = Settings("a red cat", PRESETS["INSTANT_8"], 64, 48, 0)


def short(guidance: float = 1.0) -> Settings:
    """One step more than the warm-up has."""
    return dataclasses.replace(SETTINGS, preset=Preset("SHORT", 3, 0.0, 1.75, (guidance,) * 3, "none"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def conditioning(tiny: Path) -> Conditioning:
    return encode(open_folder(tiny), SETTINGS, DEVICE)


@pytest.fixture(scope="module")
def guided(tiny: Path) -> Models:
    return load_models(open_folder(tiny, with_unconditional=True), DEVICE)


@pytest.fixture(scope="module")
def models(guided: Models) -> Models:
    return dataclasses.replace(guided, unconditional=None)


def render(models: Models, conditioning: Conditioning, settings: Settings, quality: str = "off") -> Rendering:
    renderer = Renderer(models, conditioning, settings, quality)
    renderer.warm_up()
    return renderer.render()


def identical(a: Rendering, b: Rendering) -> bool:
    return not differing_values(a.latents, b.latents) and not differing_values(a.image, b.image)


class Calls:
    """Counts the forwards of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        self.hook = module.register_forward_hook(self._note)

    def _note(self, *_: object) -> None:
        self.count += 1

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


@pytest.mark.parametrize("name", ["INSTANT_8", "FAST_20"])
def test_without_guidance_only_the_transformer_runs_once_a_step(
    models: Models, conditioning: Conditioning, name: str
) -> None:
    settings = dataclasses.replace(SETTINGS, preset=PRESETS[name])
    with Calls(models.transformer) as calls:
        rendering = Renderer(models, conditioning, settings, "off").render()
    assert calls.count == settings.preset.steps == len(rendering.render.seconds_per_step)
    assert rendering.image.shape == (1, 48, 64, 3)
    assert rendering.image.min() >= 0 and rendering.image.max() <= 1
    assert rendering.image.std() > 0.05


def test_guidance_runs_both_transformers(guided: Models, conditioning: Conditioning) -> None:
    settings = dataclasses.replace(SETTINGS, preset=PRESETS["TURBO_12"])
    with Calls(guided.transformer) as calls, Calls(guided.unconditional) as unconditional:
        Renderer(guided, conditioning, settings, "off").render()
    assert (calls.count, unconditional.count) == (12, 12)


def test_leaving_the_unconditional_out_changes_nothing_at_guidance_one(
    models: Models, guided: Models, conditioning: Conditioning
) -> None:
    assert identical(render(models, conditioning, SETTINGS), render(guided, conditioning, SETTINGS))


def test_the_scheduler_visits_the_presets_sigmas(models: Models, conditioning: Conditioning) -> None:
    preset = PRESETS["TURBO_12"]  # its mu is not the default
    preset = dataclasses.replace(preset, guidance=(1.0,) * preset.steps)
    rendering = render(models, conditioning, dataclasses.replace(SETTINGS, preset=preset))
    assert torch.equal(torch.tensor(rendering.sigmas), sigmas(preset, 64, 48))


@torch.no_grad()
def test_latents_are_those_of_euler_by_hand(models: Models, conditioning: Conditioning) -> None:
    rendering = render(models, conditioning, SETTINGS)
    levels = sigmas(SETTINGS.preset, SETTINGS.width, SETTINGS.height).to(DEVICE)
    x = torch.randn(1, 3 * 4, 128, generator=torch.Generator().manual_seed(SETTINGS.seed)).to(DEVICE)
    text = torch.zeros(1, conditioning.text_tokens, 128, device=DEVICE)
    for sigma, following in itertools.pairwise(levels):
        velocity = models.transformer(
            hidden_states=torch.cat([text, x], dim=1).bfloat16(),
            timestep=(1.0 - (sigma * 1000) / 1000)[None].bfloat16(),
            encoder_hidden_states=conditioning.features.bfloat16(),
            position_ids=conditioning.position_ids,
            segment_ids=conditioning.segment_ids,
            indicator=conditioning.indicator,
            return_dict=False,
        )[0][:, conditioning.text_tokens :]
        x = x + (sigma - following) * velocity.float()
    torch.testing.assert_close(rendering.latents, x.cpu(), rtol=0.0, atol=1e-5)


def test_the_picture_depends_on_the_seed_alone(models: Models, conditioning: Conditioning) -> None:
    first, again = (render(models, conditioning, SETTINGS) for _ in range(2))
    assert identical(first, again)
    other = render(models, conditioning, dataclasses.replace(SETTINGS, seed=1))
    assert differing_values(first.latents, other.latents) > 0


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_lossless_equals_stock_through_the_whole_pipeline(
    models: Models, guided: Models, conditioning: Conditioning, guidance: float
) -> None:
    used = models if guidance == 1.0 else guided
    stock = render(used, conditioning, short(guidance))
    renderer = Renderer(used, conditioning, short(guidance), LOSSLESS)
    renderer.warm_up()
    fused = renderer.render()
    assert identical(stock, fused)
    # silu-mul and rope add nothing up, and so are exact everywhere.
    assert renderer.unfused_reason is None
    assert renderer.fusion is not None and {"silu-mul", "rope"} <= renderer.fusion.ledger.proven
    assert fused.render.status.startswith("lossless: 2/2 blocks;")
    assert ("unconditional: lossless: 2/2 blocks" in fused.render.status) == (guidance != 1.0)


def test_kernels_run_after_the_warm_up_and_only_then(
    models: Models, conditioning: Conditioning, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ideogram4_fusion.kernels.launch import Launch
    from ideogram4_fusion.kernels.silu_mul import _silu_mul_kernel

    launches = 0
    stock = Launch.__call__

    def counted(launch: Launch, *args: Any) -> None:
        nonlocal launches
        launches += launch._kernel is _silu_mul_kernel
        stock(launch, *args)

    renderer = Renderer(models, conditioning, short(), HIGH)
    renderer.warm_up()
    monkeypatch.setattr(Launch, "__call__", counted)
    renderer.render()
    assert launches == 2 * 3  # in every block and step
    Renderer(models, conditioning, short(), "off").render()
    assert launches == 2 * 3


def test_comparison_of_stock_and_lossless_is_identical(tiny: Path) -> None:
    lines: list[str] = []
    comparison = compare_qualities(tiny, short(), ("off", LOSSLESS), DEVICE, lines.append)
    report = comparison.report
    assert report.verdict.startswith("IDENTICAL: 0 of 9,216 pixel values")
    assert (report.a.quality, report.b.quality) == ("off", LOSSLESS)
    assert report.size_note is not None and report.nothing_fused is None
    assert comparison.side_by_side.shape[2] == 64 + 8 + 64
    assert "lossless: warming up" in lines


def test_odd_sizes_are_refused() -> None:
    with pytest.raises(SettingsError, match="multiples of 16"):
        dataclasses.replace(SETTINGS, width=100)
