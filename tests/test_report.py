"""The verdict, the report's text and its data."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ideogram4_fusion.comparison.environment import describe_environment
from ideogram4_fusion.comparison.metrics import ImageMetrics, compare, compare_latents
from ideogram4_fusion.comparison.report import Render, Report, as_dict, text
from ideogram4_fusion.comparison.rounding import ceiled, floored
from ideogram4_fusion.comparison.verdict import verdict

PICTURE = torch.rand(1, 32, 32, 3, generator=torch.Generator().manual_seed(0))
LATENT = torch.randn(1, 128, 2, 2, generator=torch.Generator().manual_seed(0))
IDENTICAL = compare(PICTURE, PICTURE.clone())
SAME_LATENTS = compare_latents(LATENT, LATENT.clone())


def at_psnr(*decibels: float) -> ImageMetrics:
    """Real metrics of a batch whose images are off by a constant that gives these PSNRs."""
    offsets = torch.tensor([10 ** (-value / 20) for value in decibels], dtype=torch.float64)
    flat = torch.zeros(len(decibels), 12, 12, 3, dtype=torch.float64)
    return compare(flat, flat + offsets[:, None, None, None])


def example(metrics: ImageMetrics = IDENTICAL) -> Report:
    return Report(
        a=Render("off", "stock", (0.20, 0.10, 0.13), 1.0, 3 * 1024**3),
        b=Render("lossless", "34/34 blocks", (0.11, 0.119, 0.30), 0.9, 3 * 1024**3 + 1),
        metrics=metrics,
        preset="INSTANT_8",
        width=1024,
        height=768,
        seed=42,
        sigmas=(0.999877, 0.5, 0.0),
        environment={"gpu": "Some GPU (sm_90)", "comfyui": "0.33.0"},
        latents=SAME_LATENTS,
    )


def test_identical() -> None:
    assert verdict(IDENTICAL, SAME_LATENTS) == ("IDENTICAL: 0 of 3,072 pixel values and 0 of 512 latent values differ")
    assert verdict(IDENTICAL) == "IDENTICAL: 0 of 3,072 pixel values differ"


def test_equal_pixels_of_unequal_latents_are_not_identical() -> None:
    nudged = LATENT.clone()
    nudged[0, 0, 0, 0] += 1e-6
    assert verdict(IDENTICAL, compare_latents(LATENT, nudged)) == (
        "CLOSE: 0 of 3,072 pixel values differ, but 1 of 512 latent values do"
    )


def test_equal_rgb_with_unequal_alpha_is_not_identical() -> None:
    opaque = torch.cat([PICTURE, torch.ones(1, 32, 32, 1)], dim=-1)
    assert verdict(compare(opaque, opaque * torch.tensor([1, 1, 1, 0.5])), SAME_LATENTS).startswith("CLOSE: 0 of 3,072")


@pytest.mark.parametrize(
    ("decibels", "line"),
    [
        (41.19, "CLOSE: 41.1 dB"),
        (49.999, "CLOSE: 49.9 dB"),
        (25.01, "CLOSE: 25.0 dB"),
        (24.99, "NOT CLOSE: 24.9 dB, which fails the bar of 25 dB"),
    ],
)
def test_close_is_never_rounded_up(decibels: float, line: str) -> None:
    assert verdict(at_psnr(decibels), SAME_LATENTS) == line


def test_a_batch_is_as_close_as_its_worst_image() -> None:
    assert verdict(at_psnr(60.05, 30.05, 50.05)) == "CLOSE: 30.0 dB (worst of 3 images)"


def test_nothing_fused_comes_before_any_likeness() -> None:
    line = verdict(IDENTICAL, SAME_LATENTS, nothing_fused="Triton cannot compile")
    assert line == "NOT COMPARED: nothing was fused (Triton cannot compile)"


def test_pixels_that_are_not_finite_name_their_side() -> None:
    broken = PICTURE.clone()
    broken[0, 0, 0] = math.nan
    assert verdict(compare(broken, PICTURE)) == "NOT COMPARED: non-finite pixels in A (3 values)"
    assert verdict(compare(PICTURE, broken)) == "NOT COMPARED: non-finite pixels in B (3 values)"
    assert verdict(compare(broken, broken)) == "NOT COMPARED: non-finite pixels in A (3 values) and B (3 values)"


def test_latents_that_are_not_finite_are_not_hidden_by_the_vae() -> None:
    broken = LATENT.clone()
    broken[0, :2, 0, 0] = torch.tensor([math.nan, math.inf])
    for a, b, sides in (
        (broken, LATENT, "A (2 values)"),
        (LATENT, broken, "B (2 values)"),
        (broken, broken, "A (2 values) and B (2 values)"),
    ):
        latents = compare_latents(a, b)
        assert verdict(IDENTICAL, latents) == f"NOT COMPARED: non-finite latents in {sides}"
        written = text(replace(example(), latents=latents))
        assert "non-finite latents: " in written and "PSNR" not in written


def test_differences_beyond_the_range_of_squares_are_told_from_none() -> None:
    black = torch.zeros(1, 12, 12, 3, dtype=torch.float64)
    near = compare(black, black + 1e-200)
    assert verdict(near) == "CLOSE: 4000.0 dB"
    assert "PSNR: 4000.00 dB" in text(example(near)).splitlines()
    far = text(example(compare(black, black + 1e200)))
    assert far.startswith("NOT CLOSE: -4000.0 dB") and "identical)" not in far
    assert "largest difference: 1000000000000000000000000.0" in text(example(compare(black, black + 1e24)))


def test_text_of_identical_renders() -> None:
    report = example()
    lines = text(report).splitlines()
    assert lines[0] == report.verdict
    assert lines[0].startswith("IDENTICAL")
    for expected in (
        "PSNR: inf (identical)",
        "SSIM: 1.0000",
        "pixels: 0 of 3,072 values differ",
        "latents: 0 of 512 values differ, byte for byte",
        "A: off",
        "mounted: 34/34 blocks",
        "seconds per step: 0.1300 median of 3, 0.1000..0.2000",
        "seconds per step: 0.1190 median of 3, 0.1100..0.3000",
        "total: 0.900 s",
        "peak memory: 3.00 GiB allocated by PyTorch",
        "peak memory: 3.01 GiB allocated by PyTorch",
        "per step: lossless took 0.916 x the time of off",  # 0.119 / 0.130 = 0.9153...
        "in total: lossless took 0.900 x the time of off",
        "preset: INSTANT_8",
        "size: 1024 x 768 pixels",
        "seed: 42",
        "sigmas: 0.99988 0.50000 0.00000",
        "gpu: Some GPU (sm_90)",
        "comfyui: 0.33.0",
    ):
        assert expected in lines


def test_text_of_close_renders_rounds_against_us() -> None:
    b = (PICTURE + 0.01 * torch.randn(PICTURE.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    metrics = compare(PICTURE, b)
    assert metrics.psnr_db is not None and metrics.max_abs is not None
    printed = dict(line.split(": ", 1) for line in text(example(metrics)).splitlines() if ": " in line)
    psnr = float(printed["PSNR"].removesuffix(" dB"))
    assert psnr <= metrics.psnr_db < psnr + 0.01
    largest = float(printed["largest difference"].split()[0])
    assert largest - 1e-5 < metrics.max_abs <= largest
    assert "The latents are identical: the difference arose while they were decoded." in text(example(metrics))


def test_text_without_what_was_not_measured() -> None:
    report = example()
    bare = replace(report, a=Render("off", "stock", (), 0.0), b=Render("off", "stock", (), 0.0), latents=None)
    written = text(bare)
    assert written.count("seconds per step: not measured") == 2
    for absent in ("peak memory", "x the time of", "latents"):
        assert absent not in written


def test_two_renders_of_one_quality_are_told_apart_by_side() -> None:
    report = example()
    assert "per step: B took 0.916 x the time of A" in text(replace(report, b=replace(report.b, quality="off")))


def test_times_with_a_note_are_not_held_against_each_other() -> None:
    report = example()
    noted = text(replace(report, b=replace(report.b, note="interpreted on the CPU")))
    assert "note: interpreted on the CPU" in noted and "seconds per step: 0.1190" in noted
    assert "x the time of" not in noted
    data = as_dict(replace(report, b=replace(report.b, note="interpreted on the CPU")))
    assert data["step_ratio"] is None and data["total_ratio"] is None


def test_text_of_renders_that_were_not_fused_offers_no_likeness() -> None:
    written = text(replace(example(), nothing_fused="no GPU"))
    assert written.startswith("NOT COMPARED: nothing was fused (no GPU)\n")
    for misleading in ("PSNR", "differ", "x the time of"):
        assert misleading not in written


def test_text_of_pixels_that_are_not_finite() -> None:
    broken = PICTURE.clone()
    broken[0, 0, 0, 0] = math.inf
    written = text(example(compare(PICTURE, broken)))
    assert written.startswith("NOT COMPARED: non-finite pixels in B")
    assert "non-finite values: 0 in A, 1 in B" in written
    for misleading in ("PSNR", "SSIM", "largest"):
        assert misleading not in written


def test_the_size_note_is_printed() -> None:
    assert "note: too small." in text(replace(example(), size_note="too small."))


def test_data_is_strict_json_and_unrounded() -> None:
    report = example()
    data = json.loads(json.dumps(as_dict(report), allow_nan=False))
    assert data["verdict"] == report.verdict
    assert data["metrics"]["psnr_db"] == "inf"
    assert data["metrics"]["psnr_per_image"] == ["inf"]
    assert data["step_ratio"] == 0.119 / 0.13
    assert data["b"]["seconds_per_step"] == [0.11, 0.119, 0.30]
    assert data["sigmas"] == [0.999877, 0.5, 0.0]
    assert data["latents"] == {"values": 512, "differing": 0, "nonfinite_a": 0, "nonfinite_b": 0}
    assert data["environment"]["comfyui"] == "0.33.0"


@pytest.mark.parametrize(
    ("value", "down", "up"),
    [
        (41.1, "41.1", "41.1"),
        (0.3, "0.3", "0.3"),
        (41.199999, "41.1", "41.2"),
        (0.0, "0.0", "0.0"),
        (1e-9, "0.0", "0.1"),
        (1e24, "1000000000000000000000000.0", "1000000000000000000000000.0"),
        (1e300, f"1{'0' * 300}.0", f"1{'0' * 300}.0"),
    ],
)
def test_rounding_goes_one_way_and_leaves_exact_decimals(value: float, down: str, up: str) -> None:
    assert floored(value, 1) == down
    assert ceiled(value, 1) == up


def test_environment_names_what_it_ran_on() -> None:
    found = describe_environment("cpu")
    assert found["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["gpu"] == "none (cpu)"
    assert found["triton"]


def test_nothing_optional_is_imported_before_it_is_needed() -> None:
    tests = Path(__file__).parent
    script = (
        f"import sys; sys.path.insert(0, {str(tests)!r}); import conftest\n"
        "from ideogram4_fusion.comparison import environment, metrics, pictures, report\n"
        "environment.describe_environment('cpu')\n"
        "print([name for name in ('triton', 'kornia', 'PIL', 'comfy', 'diffusers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
