"""The demo's checkpoint as it is cloned: a small, ordinary folder, on which `high` is near `lossless`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from ideogram4_fusion.benchmarks import headless_generations
from ideogram4_fusion.benchmarks.prompts import PROMPTS
from ideogram4_fusion.checkpoint.folder import open_folder
from ideogram4_fusion.comparison.metrics import compare
from ideogram4_fusion.fusion.fusion import HIGH, LOSSLESS, OFF
from ideogram4_fusion.hosts.diffusers.conditioning import encode
from ideogram4_fusion.hosts.diffusers.demo import DEMO_CHECKPOINT
from ideogram4_fusion.hosts.diffusers.load import Models, load_models
from ideogram4_fusion.hosts.diffusers.render import Renderer, Rendering
from ideogram4_fusion.hosts.diffusers.settings import Settings
from ideogram4_fusion.sampling.presets import PRESETS

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
# Interpreted, a step of 256 pixels takes two to six seconds. With 36 tokens of image and these captions a row kernel is
# one program of 64 rows.
SIDE = 256 if torch.cuda.is_available() else 96
# Their pictures are the same bytes, as test_headless_render.py demands; interpreted, stock is the faster of the two.
REFERENCE = LOSSLESS if torch.cuda.is_available() else OFF
LARGEST = 20_000_000  # bytes, of all its files
CAPTIONS = (
    "a red star on blue, the word HELLO",
    "a white circle on purple, the word MOON",
    "an orange square on white, the word TREE",
)
PSNR_DB, SSIM = 35.0, 0.98  # the least of any caption; benchmarks/comfyui_distance.py has the distribution of 64


@pytest.fixture(scope="module")
def models() -> Models:
    return load_models(open_folder(DEMO_CHECKPOINT), DEVICE)


def render(models: Models, settings: Settings, quality: str) -> Rendering:
    renderer = Renderer(models, encode(open_folder(DEMO_CHECKPOINT), settings, DEVICE), settings, quality)
    renderer.warm_up()
    return renderer.render()


def test_it_is_an_ordinary_folder_and_small(models: Models) -> None:
    assert models.checkpoint.describe() == "official row-wise fp8, fused qkv, 6 layers x 384"
    files: list[Path] = [file for file in DEMO_CHECKPOINT.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= LARGEST


@pytest.mark.parametrize("caption", CAPTIONS)
def test_high_is_near_lossless(models: Models, caption: str) -> None:
    settings = Settings(caption, PRESETS["INSTANT_8"], SIDE, SIDE, 0)
    lossless, high = (render(models, settings, quality) for quality in (REFERENCE, HIGH))
    assert lossless.image.std() > 0.05
    assert high.render.status.startswith("high: 6/6 blocks")
    found = compare(lossless.image, high.image)
    print(f"{caption}: PSNR {found.psnr_db} dB, SSIM {found.ssim}")
    assert found.psnr_db is None or found.psnr_db >= PSNR_DB
    assert found.ssim is not None and found.ssim >= SSIM


def test_make_bench_takes_it_as_real_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make bench CHECKPOINT=folder` runs, at a size that a CPU renders in seconds."""
    output = tmp_path / "headless.json"
    short = ["--presets", "INSTANT_8", "--qualities", OFF, "--size", str(SIDE), "--generations", "2"]
    monkeypatch.setattr("sys.argv", ["bench", str(DEMO_CHECKPOINT), *short, "--output", str(output)])
    headless_generations.main()
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found["origin"]["commit"]
    assert [row["prompt"] for row in found["rows"]] == list(PROMPTS)
    for row in found["rows"]:
        assert (row["preset"], row["quality"], row["size"]) == ("INSTANT_8", OFF, SIDE)
        assert row["seconds"] > 0 and row["seconds_spread"]["runs"] == 1
        assert row["equal_to_stock"] and row["psnr_db"] is None and row["ssim"] is None
    assert len({row["md5"] for row in found["rows"]}) == len(PROMPTS)
