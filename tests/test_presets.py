"""Presets and their sigmas, against published tables, an oracle without torch, and diffusers."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from ideogram4_fusion.sampling.presets import PRESETS, Preset
from ideogram4_fusion.sampling.schedule import sigmas, size_note

# Printed to five decimals at 1024 x 1024: half a unit of the last digit, plus float32 rounding.
FIVE_DECIMALS = 5.1e-6
AT_1024 = {
    "INSTANT_8": ".99988 .93739 .86686 .77743 .66667 .53383 .38055 .21082 0",
    "FAST_20": ".99988 .97266 .94959 .92462 .89715 .86686 .83353 .79697 .75704 .71362 .66667 "
    ".61615 .56212 .50471 .44410 .38055 .31439 .24590 .17515 .10107 0",
    "TURBO_12": ".99988 .97375 .94716 .91478 .87511 .82655 .76730 .69527 .60811 .50320 .37758 .22669 0",
}
# INSTANT_8 to four decimals.
INSTANT_BY_SIDE = {
    512: ".9999 .8822 .7650 .6359 .5000 .3641 .2350 .1178 0",
    1024: ".9999 .9374 .8669 .7774 .6667 .5338 .3806 .2108 0",
    2048: ".9999 .9677 .9287 .8748 .8000 .6961 .5513 .3482 0",
}


def table(line: str) -> torch.Tensor:
    return torch.tensor([float(value) for value in line.split()])


def by_hand(preset: Preset, width: int, height: int) -> list[float]:
    mean = preset.mu + math.log(width * height / 512**2) / 2
    inner = [NormalDist().inv_cdf(1 - i / preset.steps) for i in range(1, preset.steps)]
    return [1 / (1 + math.exp(-9)), *(1 / (1 + math.exp(-mean - preset.std * z)) for z in inner), 0.0]


def test_names_and_order_are_those_saved_in_workflows() -> None:
    assert list(PRESETS) == ["INSTANT_8", "FAST_20", "DEFAULT_20", "QUALITY_48", "TURBO_12"]
    assert all(name == preset.name for name, preset in PRESETS.items())


def test_guidance_starts_at_the_noisy_end() -> None:
    assert PRESETS["QUALITY_48"].guidance == (7.0,) * 45 + (3.0,) * 3
    assert PRESETS["DEFAULT_20"].guidance == (7.0,) * 18 + (3.0,) * 2
    assert PRESETS["TURBO_12"].guidance == (7.0,) * 11 + (3.0,)


def test_only_the_undistilled_presets_need_the_unconditional_model() -> None:
    needing = {name for name, preset in PRESETS.items() if preset.needs_unconditional}
    assert needing == {"DEFAULT_20", "QUALITY_48", "TURBO_12"}


def test_guidance_must_have_one_value_a_step() -> None:
    with pytest.raises(ValueError, match="48 guidance values for 8 steps"):
        Preset("MIXED", 8, 0.0, 1.75, PRESETS["QUALITY_48"].guidance, "nobody/nothing")


@pytest.mark.parametrize("name", AT_1024)
def test_published_table_at_1024(name: str) -> None:
    torch.testing.assert_close(sigmas(PRESETS[name], 1024, 1024), table(AT_1024[name]), rtol=0, atol=FIVE_DECIMALS)


def test_default_differs_from_fast_in_guidance_only() -> None:
    assert torch.equal(sigmas(PRESETS["DEFAULT_20"], 1024, 1024), sigmas(PRESETS["FAST_20"], 1024, 1024))


def test_published_ends_of_quality_at_1024() -> None:
    levels = sigmas(PRESETS["QUALITY_48"], 1024, 1024)
    ends = torch.cat([levels[:4], levels[-4:]])
    expected = table(".99988 .97699 .96411 .95232 .16686 .12962 .08611 0")
    torch.testing.assert_close(ends, expected, rtol=0, atol=FIVE_DECIMALS)


@pytest.mark.parametrize("side", INSTANT_BY_SIDE)
def test_instant_shifts_with_the_size(side: int) -> None:
    levels = sigmas(PRESETS["INSTANT_8"], side, side)
    torch.testing.assert_close(levels, table(INSTANT_BY_SIDE[side]), rtol=0, atol=5.1e-5)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("size", [(512, 512), (1024, 1024), (1536, 640), (640, 1536), (2048, 2048)])
def test_every_preset_against_the_formula_in_plain_python(name: str, size: tuple[int, int]) -> None:
    preset = PRESETS[name]
    levels = sigmas(preset, *size)
    assert levels.dtype == torch.float32
    assert levels.shape == (preset.steps + 1,)
    assert levels[-1] == 0.0
    assert (levels.diff() < 0).all()
    # inv_cdf is good to about 1e-9 and the result is float32, whose half unit below 1 is 3e-8.
    torch.testing.assert_close(levels, torch.tensor(by_hand(preset, *size)), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("size", [(1024, 1024), (1536, 640)])
def test_bit_equal_to_diffusers(name: str, size: tuple[int, int]) -> None:
    pipeline = pytest.importorskip("diffusers.pipelines.ideogram4.pipeline_ideogram4")
    preset, (width, height) = PRESETS[name], size
    mean = pipeline._resolution_aware_mu(height, width, preset.mu)
    reference = pipeline._logit_normal_sigmas(preset.steps, mean, std=preset.std)
    assert torch.equal(sigmas(preset, width, height)[:-1], reference)


@pytest.mark.parametrize("size", [(1000, 1024), (1024, 1032), (0, 1024), (1024, -16)])
def test_sides_that_no_latent_has_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"got {size[0]} x {size[1]}"):
        sigmas(PRESETS["INSTANT_8"], *size)


@pytest.mark.parametrize("size", [(256, 256), (2048, 2048), (1536, 256), (352, 2048)])
def test_no_note_within_the_documented_sizes(size: tuple[int, int]) -> None:
    assert size_note(*size) is None


@pytest.mark.parametrize("size", [(240, 256), (2064, 1024), (2048, 336), (256, 1552)])
def test_a_note_outside_the_documented_sizes_which_still_have_sigmas(size: tuple[int, int]) -> None:
    note = size_note(*size)
    assert note is not None
    assert note.startswith(f"{size[0]} x {size[1]} is outside")
    assert sigmas(PRESETS["INSTANT_8"], *size)[-1] == 0.0
