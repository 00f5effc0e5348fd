"""Which of core's fp8 Linears are given fp8, and which are left as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ideogram4_fusion.benchmarks import layouts
from ideogram4_fusion.hosts.comfyui.fp8 import EMISSION
from ideogram4_fusion.hosts.comfyui.load import load_diffusion_model
from ideogram4_fusion.tests.tiny import tiny_config, tiny_state_dict, write_file

Change = Callable[[Any], object]

CHANGES: dict[str, Change] = {
    "full_precision_matrix_mult": lambda linear: setattr(linear, "_full_precision_mm", True),
    "input scale": lambda linear: linear.register_parameter("input_scale", torch.nn.Parameter(torch.ones(()))),
    "scale before quantising": lambda linear: setattr(linear, "pre_quant_scale", torch.ones(4)),
    "int8": lambda linear: setattr(linear, "layout_type", "TensorWiseINT8Layout"),
    "nvfp4": lambda linear: setattr(linear, "layout_type", "TensorCoreNVFP4Layout"),
    "row-wise": lambda linear: setattr(linear, "layout_type", "Ideogram4RowWiseFP8Layout"),
    "no quantisation": lambda linear: linear.__dict__.pop("layout_type"),
    "LoRA on the weight": lambda linear: setattr(linear, "weight_function", [lambda weight: weight]),
    "LoRA on the bias": lambda linear: setattr(linear, "bias_function", [lambda bias: bias]),
    "forced casts": lambda linear: setattr(linear, "comfy_force_cast_weights", True),
    "hook": lambda linear: linear.register_forward_hook(lambda *_: None),
    "patch": lambda linear: setattr(linear, "forward", lambda x: x),
}


@pytest.fixture
def linear(tmp_path: Path) -> Any:
    """An fp8_scaled Linear as a GPU with fp8 products finds it."""
    config = tiny_config()
    file = write_file(tmp_path / "model.safetensors", layouts.as_scaled(tiny_state_dict(config)), config)
    with torch.inference_mode():
        model = load_diffusion_model(file)
    found = model.model.diffusion_model.layers[0].feed_forward.w2
    found._full_precision_mm = False  # core sets it where the GPU has none
    return found


def test_a_plain_one_is(linear: Any) -> None:
    assert EMISSION.takes(linear) and not EMISSION.takes_rows(linear)


@pytest.mark.parametrize("change", CHANGES)
def test_one_that_would_compute_otherwise_is_not(linear: Any, change: str) -> None:
    CHANGES[change](linear)
    assert not EMISSION.takes(linear)
