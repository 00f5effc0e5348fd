"""The benchmark of distances, run on the demo's weights: it tells what equals stock from what does not, piece by piece.

On a GPU as `make bench` runs it: 64 captions, both layouts, with the pack's kernels, held to the bar. A CPU interprets
kernels and has neither cuDNN nor fp8 products: there two small pictures, and in the kernels' place their eager forms,
one of which rounds otherwise.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import comfy.cli_args
import comfy.model_management
import ideogram4_fusion.fusion.fusion
import pytest
import torch
from ideogram4_fusion.benchmarks import comfyui_distance
from ideogram4_fusion.benchmarks.comfyui_distance import LAYOUTS
from ideogram4_fusion.comparison.verdict import CLOSE_DB
from ideogram4_fusion.fusion.chains import SILU_MUL
from ideogram4_fusion.hosts.diffusers.demo import DEMO_CHECKPOINT
from ideogram4_fusion.sampling.presets import PRESETS

ON_GPU = torch.cuda.is_available()
PRESET, CAPTIONS = "INSTANT_8", 64 if ON_GPU else 2
MEDIAN_DB = 38.0  # at least, of `high` to `lossless`
PIECES = ("attention", "fast accumulation", "row-wise fp8", "unproven chains")
NAMES = ("lossless", "high", "stock", "nothing", *PIECES)
# A CPU mounts the chain that rounds otherwise as an unproven one; on a GPU it is each piece's own affair.
DIFFERENT = ("high",) if ON_GPU else ("high", "unproven chains")
EQUAL = ("lossless", "stock", "nothing") if ON_GPU else tuple(name for name in NAMES if name not in DIFFERENT)


@pytest.fixture
def rows(
    exact_on_the_cpu: None, one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    if not ON_GPU:
        monkeypatch.setattr(comfyui_distance, "SIDE", 64)
        monkeypatch.setattr(comfyui_distance, "FOLLOWED", 1)
        # core would compute in fp32, where nothing is fused.
        monkeypatch.setattr(comfy.cli_args.args, "bf16_unet", True)
        monkeypatch.setattr(comfy.model_management, "unet_manual_cast", lambda *args, **named: None)
        chains = dict(ideogram4_fusion.fusion.fusion.load_chains())
        chains[SILU_MUL] = dataclasses.replace(chains[SILU_MUL], fused=rounded_otherwise)
        monkeypatch.setattr(ideogram4_fusion.fusion.fusion, "load_chains", lambda: chains)
    output = tmp_path / "distance.json"
    options = Namespace(
        folder=DEMO_CHECKPOINT, captions=CAPTIONS, layouts=LAYOUTS, presets=[PRESET], no_block=True, output=output
    )
    comfyui_distance.run(options, tmp_path)
    found: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))["rows"]
    return found


def rounded_otherwise(gate: torch.Tensor, up: torch.Tensor, form: object = None) -> torch.Tensor:
    """silu(gate) * up, rounded once instead of twice."""
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def test_distances_of_each_piece(rows: list[dict[str, Any]]) -> None:
    assert [(row["layout"], row["variant"]) for row in rows] == [(one, name) for one in LAYOUTS for name in NAMES]
    for row in rows:
        psnr, ssim = row["psnr_db_to_lossless"], row["ssim_to_lossless"]
        print(row["layout"], row["variant"], row["status"], f"PSNR {psnr}, SSIM {ssim}", sep="; ")
        for name in ("psnr_db", "ssim"):
            assert all(len(row[f"{name}_to_{other}"]["values"]) == CAPTIONS for other in ("lossless", "fp32"))
        for name in ("drift_from", "velocity_error_to"):
            assert all(len(row[f"{name}_{other}"]) == PRESETS[PRESET].steps for other in ("lossless", "fp32"))
        # Nothing computes in fp32 here but the reference for it.
        assert row["identical_to_fp32"] == 0 and min(row["velocity_error_to_fp32"] + row["drift_from_fp32"]) > 0
        if row["variant"] in EQUAL:
            assert row["identical_to_lossless"] == CAPTIONS
            assert max(row["velocity_error_to_lossless"] + row["drift_from_lossless"]) == 0
        elif row["variant"] in DIFFERENT:
            assert row["identical_to_lossless"] < CAPTIONS
            assert min(row["velocity_error_to_lossless"] + row["drift_from_lossless"]) > 0
            assert psnr["median"] >= MEDIAN_DB and psnr["min"] >= CLOSE_DB
    found = {(row["layout"], row["variant"]): row for row in rows}
    assert all(found[layout, "stock"]["status"] == "off: stock" for layout in LAYOUTS)
    row_wise, scaled = (found[layout, "lossless"]["drift_from_fp32"] for layout in LAYOUTS)
    assert row_wise != scaled, "the layouts round their weights otherwise"


def test_pictures_are_the_same_where_all_of_them_are() -> None:
    """Only then are the distances of one variant those of another."""
    black, white = torch.zeros(1, 2, 2, 3), torch.ones(1, 2, 2, 3)
    both, other = (comfyui_distance._Rendered(pictures, []) for pictures in ([black, white], [black, black]))
    assert both.shows_the_same_as(comfyui_distance._Rendered([black, white], []))
    assert not both.shows_the_same_as(other)
