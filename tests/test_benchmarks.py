"""What the benchmark scripts make of their measurements; the measurements need a GPU."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ideogram4_fusion.benchmarks import kernel_rivals, record, table
from ideogram4_fusion.benchmarks.kernel_workloads import workloads
from ideogram4_fusion.fusion.proof import paired

SPREAD = {"median": 10.0, "q1": 9.5, "q3": 10.5, "min": 9.0, "max": 11.0, "runs": 5}


def step(size: int, ratio: float | None, quality: str = "lossless") -> dict[str, Any]:
    return {
        "size": size,
        "quality": quality,
        "step_ms_spread": SPREAD,
        "stock_step_ms_spread": SPREAD,
        "ratio_to_stock": ratio,
        "equal_to_stock": ratio is not None,
    }


def generation(quality: str, seconds: float) -> dict[str, Any]:
    return {
        "preset": "INSTANT_8",
        "size": 1024,
        "quality": quality,
        "seconds": seconds,
        "equal_to_stock": True,
        "ratio_to_stock": 1.2 / seconds,
    }


def kernel(tokens: int, us: float | None) -> dict[str, Any]:
    others = {"A": {"median": 19.99, "equal": False}, "B": {"failed": "TypeError"}}
    row = {"chain": "gate", "tokens": tokens, "dtype_out": "bfloat16", "us": us}
    return row if us is None else {**row, "times_floor": 1.2001, "eager_us": 99.04, "others_us": others}


def distance(variant: str, psnr: float | None, ssim: float, errors: tuple[float, float]) -> dict[str, Any]:
    to_lossless, to_fp32 = errors
    return {
        "layout": "fp8_scaled",
        "variant": variant,
        "preset": "INSTANT_8",
        "psnr_db": {"median": psnr, "min": None if psnr is None else psnr - 12},
        "ssim": {"median": ssim, "min": ssim - 0.038},
        "identical": 2 if psnr is None else 0,
        "captions": 2,
        "velocity_error_to_lossless": [to_lossless, to_lossless, 1.0],
        "velocity_error_to_fp32": [0.0, to_fp32, to_fp32],
    }


def block(variant: str, to_lossless: float, to_fp32: float) -> dict[str, Any]:
    errors = {"velocity_error_to_lossless": to_lossless, "velocity_error_to_fp32": to_fp32}
    return {"layout": "fp8_scaled", "variant": variant, **errors}


DISTANCE = {
    "rows": [distance("lossless", None, 1.0, (0.0, 0.0041)), distance("attention", 41.99, 0.9876, (0.0123, 0.0203))],
    "blocks": [block("lossless", 0.0, 0.0012), block("attention", 0.0031, 0.0042)],
}


def test_the_tables_say_what_was_measured(tmp_path: Path) -> None:
    dynamic = {
        "steps": [step(1024, 1.199), step(512, None), step(1024, 1.509, "high")],
        "generations": [generation("off", 1.2), generation("lossless", 1.0)],
    }
    (tmp_path / "comfyui_dynamic.json").write_text(json.dumps(dynamic))
    kernels = {"rows": [kernel(512, 1.0), kernel(table.SHOWN_TOKENS, 36.14), kernel(table.SHOWN_TOKENS, None)]}
    (tmp_path / "kernels.json").write_text(json.dumps(kernels))
    (tmp_path / "comfyui_distance.json").write_text(json.dumps(DISTANCE))
    lines = table.measured(False, tmp_path).splitlines()
    assert "| fp8_scaled, dynamic VRAM (default) | 1024 px | 512 px | equal |" in lines
    assert "| stock, ms | 10.0 (9.5 to 10.5) | 10.0 (9.5 to 10.5) |  |" in lines
    assert "| lossless | **1.19** 10.0 (9.5 to 10.5) | 10.0 (9.5 to 10.5) | NO |" in lines
    assert "| high | **1.50** 10.0 (9.5 to 10.5) |  | yes |" in lines
    assert "| INSTANT_8, 1024, lossless | fp8_scaled, dynamic VRAM (default) | 1.20 | 1.00 | 1.20 | yes |" in lines
    assert "| gate | bf16 | 36.2 | 1.21 | 99.0 | A 19.9 (not equal) |" in lines
    assert "| gate | bf16 | not equal |  |  |  |" in lines
    assert not any("| 1.0 |" in line for line in lines), "other sizes are in the results alone"


def test_the_distances_are_rounded_against_us_and_a_piece_is_not_in_brief(tmp_path: Path) -> None:
    (tmp_path / "comfyui_distance.json").write_text(json.dumps(DISTANCE))
    same = "| lossless | fp8_scaled | identical | 0.0 %, 0.5 % | 0.0 %, 0.2 % |"
    piece = "| high: attention | fp8_scaled | 41.9 (29.9), 0.987 (0.949) | 1.3 %, 2.1 % | 0.4 %, 0.5 % |"
    lines = table.measured(False, tmp_path).splitlines()
    assert same in lines and piece in lines
    lines = table.measured(True, tmp_path).splitlines()
    assert same in lines and piece not in lines


@pytest.mark.parametrize("document", table.DOCUMENTS, ids=lambda document: document.name)
def test_the_documents_hold_the_tables_of_the_results(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert table.BEGIN in text and table.END in text
    made = table.inserted(text, table.DOCUMENTS[document])
    assert made == text, "run `make bench`, or python -m ideogram4_fusion.benchmarks.table"


def test_a_document_without_a_place_for_them_is_left_alone() -> None:
    with pytest.raises(ValueError, match="no place"):
        table.inserted(f"text\n{table.BEGIN}\nall the rest", brief=True)


def test_the_commit_that_was_told_has_the_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_COMMIT", "told")
    assert record.commit() == "told"


def test_random_weights_are_said_to_be(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for name, metadata in (("made", {record.RANDOM: "yes"}), ("trained", None)):
        save_file({"x": torch.zeros(1)}, str(tmp_path / name), metadata)
    assert record.checkpoint(tmp_path / "made", "bf16") == "bf16, random weights"
    assert record.checkpoint(tmp_path / "trained", "bf16") == "bf16"


def test_spread_of_one_and_of_many() -> None:
    assert record.spread([3.0])["median"] == 3.0
    many = record.spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (many["median"], many["min"], many["max"], many["runs"]) == (3.0, 1.0, 5.0, 5)


def test_sglangs_kernels_are_called_by_their_own_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package: its functions in eager form, found where one of its releases has them."""

    def rmsnorm_scale(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps) * scale

    def rmsnorm_tanh_residual(
        x: torch.Tensor, gate: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return residual + torch.tanh(gate) * torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    def fused_silu_mul_bitexact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(a) * b

    functions = {f.__name__: f for f in (rmsnorm_scale, rmsnorm_tanh_residual, fused_silu_mul_bitexact)}
    monkeypatch.setattr(kernel_rivals, "_SGLANG", ("absent_sglang", "stand_in_sglang"))
    monkeypatch.setitem(sys.modules, "stand_in_sglang", types.SimpleNamespace(**functions))
    found = set()
    for workload in workloads(3, torch.device("cpu"), seed=0):
        form = kernel_rivals.rivals(workload, compiles=False).get("SGLang")
        if form is not None:
            found.add(workload.chain)
            for theirs, eager in paired(form(*workload.arguments), workload.eager(*workload.arguments)):
                assert torch.equal(theirs, eager)
    assert found == {"modulate", "gate", "silu-mul"}


def test_bytes_of_a_chain() -> None:
    moved = {(w.chain, w.dtype_out): w.moved for w in workloads(2, torch.device("cpu"), seed=0)}
    row = 2 * 2 * 4608
    assert moved["modulate", torch.bfloat16] == 2 * row
    assert moved["modulate", torch.float8_e4m3fn] == 1.5 * row
    assert moved["gate+modulate", torch.float8_e4m3fn] == 3.5 * row
    assert moved["gate", torch.bfloat16] == 3 * row
