"""Dimensions from tensors and config, completeness, and what is said where they disagree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ideogram4_fusion.checkpoint.completeness import linear_shapes, other_shapes
from ideogram4_fusion.checkpoint.config import find_config
from ideogram4_fusion.checkpoint.dimensions import Dimensions, read_dimensions
from ideogram4_fusion.checkpoint.errors import CheckpointError
from ideogram4_fusion.checkpoint.header import read_header
from ideogram4_fusion.checkpoint.inspection import inspect_checkpoint
from ideogram4_fusion.checkpoint.layout import identify
from ideogram4_fusion.tests.tiny import (
    StateDict,
    quantise_row_wise,
    quantise_scaled,
    split_names,
    tiny_config,
    tiny_state_dict,
    write_file,
)

OFFICIAL = Dimensions(
    in_channels=128,
    num_layers=34,
    num_attention_heads=18,
    attention_head_dim=256,
    intermediate_size=12288,
    adaln_dim=512,
    llm_features_dim=53248,
    rope_theta=5_000_000,
    mrope_section=(24, 20, 20),
    norm_eps=1e-5,
)
LAYOUTS: dict[str, Callable[[StateDict], StateDict]] = {
    "fp32": lambda weights: weights,
    "split": split_names,
    "row-wise": quantise_row_wise,
    "row-wise split": lambda weights: split_names(quantise_row_wise(weights)),
    "scaled": quantise_scaled,
}


def test_official_model_has_the_published_counts() -> None:
    """Parameters as in the bf16 releases (9,279,288,448), tensors 458 fused and 526 split, 211 Linears fused."""
    for naming, tensors in (("fused", 458), ("split", 526)):
        linears = linear_shapes(OFFICIAL, naming)  # type: ignore[arg-type]
        others = other_shapes(OFFICIAL, naming)  # type: ignore[arg-type]
        parameters = sum(torch.Size(shape).numel() for shape in [*linears.values(), *others.values()])
        assert len(linears) + len(others) == tensors
        assert parameters == 9_279_288_448
    assert len(linear_shapes(OFFICIAL, "fused")) == 211


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_inspected(tmp_path: Path, layout: str) -> None:
    config = tiny_config(num_layers=3)
    file = write_file(tmp_path / "m.safetensors", LAYOUTS[layout](tiny_state_dict(config)), config)
    checkpoint = inspect_checkpoint(file)
    expected = {name: value for name, value in config.items() if not name.startswith("_")}
    assert checkpoint.dimensions.as_config() == {**expected, "mrope_section": (6, 5, 5)}
    assert checkpoint.dimensions.hidden_size == 128
    assert checkpoint.describe() == f"{checkpoint.layout.describe()}, 3 layers x 128"


def dimensions_of(
    folder: Path, config: dict[str, Any], given: dict[str, Any] | None = None, metadata: dict[str, str] | None = None
) -> Dimensions:
    header = read_header(write_file(folder / "m.safetensors", tiny_state_dict(config), metadata=metadata))
    return read_dimensions(header, identify(header), given)


def test_heads_of_256_need_no_config(tmp_path: Path) -> None:
    dims = dimensions_of(tmp_path, tiny_config(num_attention_heads=1, attention_head_dim=256))
    assert (dims.rope_theta, dims.mrope_section, dims.norm_eps) == (5_000_000, (24, 20, 20), 1e-5)


def test_other_heads_need_one_and_are_told_where(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rope_theta, mrope_section, norm_eps cannot be read") as caught:
        dimensions_of(tmp_path, tiny_config())
    assert f"config.json) into {tmp_path}" in str(caught.value)
    with pytest.raises(CheckpointError, match=r": norm_eps cannot be read"):
        partial = tiny_config()
        del partial["norm_eps"]
        dimensions_of(tmp_path, tiny_config(), partial)


def test_config_in_the_metadata(tmp_path: Path) -> None:
    config = tiny_config()
    dims = dimensions_of(tmp_path, config, metadata={"config": json.dumps(config)})
    assert (dims.rope_theta, dims.mrope_section, dims.norm_eps) == (10_000, (6, 5, 5), 1e-3)
    # One that is passed goes before it.
    dims = dimensions_of(tmp_path, config, tiny_config(norm_eps=1e-2), {"config": json.dumps(config)})
    assert dims.norm_eps == 1e-2


def test_contradiction_names_both_values(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_layers is 34, the tensors say 2"):
        dimensions_of(tmp_path, tiny_config(), tiny_config(num_layers=34))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rope_theta": "5e6"},
        {"rope_theta": 0},
        {"rope_theta": 10**400},
        {"rope_theta": float("inf")},
        {"rope_theta": float("nan")},
        {"norm_eps": -1e-5},
        {"norm_eps": None},
        {"mrope_section": [6, 5]},
        {"mrope_section": [6, 5, 5.0]},
        # 16 frequencies: the sixth of width would be number 17.
        {"mrope_section": [4, 5, 6]},
        {"mrope_section": 16},
    ],
)
def test_nonsense_in_the_config(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        dimensions_of(tmp_path, tiny_config(), tiny_config(**wrong))


def test_find_config_takes_only_its_own(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    assert find_config(file) is None
    for text, found in (
        ("[]", None),
        ('{"_class_name": "FluxTransformer2DModel", "num_layers": 19}', None),
        ('{"_class_name": "Ideogram4Transformer2DModel"}', {"_class_name": "Ideogram4Transformer2DModel"}),
    ):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        assert find_config(file) == found


def test_config_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()), encoding="utf-8-sig")
    assert find_config(tmp_path / "m.safetensors") == tiny_config()


@pytest.mark.parametrize(
    "content",
    [b"not json", b"", "{}".encode("utf-16"), b'{"norm_eps": 1e-3', b'{"a":' * 100_000],
    ids=["text", "empty", "utf-16", "cut short", "nested"],
)
def test_unreadable_config_is_no_absent_one(tmp_path: Path, content: bytes) -> None:
    """Heads of 256 would go on with the official values."""
    config = tiny_config(num_attention_heads=1, attention_head_dim=256)
    file = write_file(tmp_path / "m.safetensors", tiny_state_dict(config))
    inspect_checkpoint(file)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="no JSON text in UTF-8") as caught:
        inspect_checkpoint(file)
    assert caught.value.file == tmp_path / "config.json"


def test_unreadable_config_in_the_metadata(tmp_path: Path) -> None:
    for text in ('{"norm_eps": ', '{"a":' * 100_000):
        with pytest.raises(CheckpointError, match="config in its metadata cannot be read"):
            dimensions_of(tmp_path, tiny_config(), metadata={"config": text})
    official = tiny_config(num_attention_heads=1, attention_head_dim=256)
    assert dimensions_of(tmp_path, official, metadata={"config": "train.yaml"}).norm_eps == 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"in_channels": 0}, "in_channels 0"),
        ({"intermediate_size": 0}, "intermediate_size 0"),
        ({"adaln_dim": 0}, "adaln_dim 0"),
        ({"llm_features_dim": 0}, "llm_features_dim 0"),
        ({"in_channels": 126}, "126 channels cannot hold a patch"),
    ],
)
def test_sizes_that_no_model_has(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = tiny_config(**changes)
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    weights = tiny_state_dict(tiny_config())
    weights["input_proj.weight"] = torch.zeros(hidden, config["in_channels"])
    weights["layers.0.feed_forward.w1.weight"] = torch.zeros(config["intermediate_size"], hidden)
    weights["adaln_proj.weight"] = torch.zeros(config["adaln_dim"], hidden)
    weights["llm_cond_norm.weight"] = torch.zeros(config["llm_features_dim"])
    assert words in str(complaint(tmp_path, weights))


def complaint(folder: Path, tensors: StateDict) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(write_file(folder / "m.safetensors", tensors, tiny_config()))
    return caught.value


def test_missing_unknown_and_misshapen_are_named_together(tmp_path: Path) -> None:
    weights = tiny_state_dict(tiny_config())
    for name in ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "attention.o", "attention.qkv"):
        del weights[f"layers.1.{name}.weight"]
    weights["layers.0.attention.rotary"] = torch.zeros(2)
    weights["final_layer.linear.weight"] = torch.zeros(64, 128)
    weights["adaln_proj.bias"] = torch.zeros(48, dtype=torch.float64)
    message = str(complaint(tmp_path, weights))
    assert "5 tensors missing: " in message
    assert "and 2 more" in message
    assert "1 tensor unknown: layers.0.attention.rotary;" in message
    assert "final_layer.linear.weight is [64, 128] F32, expected [128, 128] BF16/F16/F32" in message
    assert "adaln_proj.bias is [48] F64" in message


def test_missing_layer(tmp_path: Path) -> None:
    config = tiny_config(num_layers=3)
    weights = {name: t for name, t in tiny_state_dict(config).items() if not name.startswith("layers.1.")}
    error = complaint(tmp_path, weights)
    assert error.key is not None
    assert error.key.startswith("layers.1.")


def test_sensitive_layers_may_stay_in_bf16(tmp_path: Path) -> None:
    for quantise in (quantise_row_wise, quantise_scaled):
        tensors = quantise(tiny_state_dict(tiny_config()))
        for companion in ("_scale", "comfy_quant"):
            tensors.pop(f"input_proj.weight{companion}", None)
        tensors.pop("input_proj.comfy_quant", None)
        tensors["input_proj.weight"] = tensors["input_proj.weight"].to(torch.bfloat16)
        inspect_checkpoint(write_file(tmp_path / "m.safetensors", tensors, tiny_config()))


def test_scale_of_another_dtype_or_without_its_weight(tmp_path: Path) -> None:
    tensors = quantise_row_wise(tiny_state_dict(tiny_config()))
    half = {**tensors, "input_proj.weight_scale": tensors["input_proj.weight_scale"].half()}
    assert "input_proj.weight_scale is [128] F16, expected [128] F32" in str(complaint(tmp_path, half))
    plain = {**tensors, "input_proj.weight": tensors["input_proj.weight"].to(torch.bfloat16)}
    assert "1 tensor unknown: input_proj.weight_scale" in str(complaint(tmp_path, plain))


def test_input_scales_belong_to_per_tensor_fp8_only(tmp_path: Path) -> None:
    tensors = {**quantise_scaled(tiny_state_dict(tiny_config())), "input_proj.input_scale": torch.tensor(0.5)}
    inspect_checkpoint(write_file(tmp_path / "m.safetensors", tensors, tiny_config()))
    row_wise = {**quantise_row_wise(tiny_state_dict(tiny_config())), "input_proj.input_scale": torch.tensor(0.5)}
    assert "1 tensor unknown: input_proj.input_scale" in str(complaint(tmp_path, row_wise))


def test_other_parts_of_an_all_in_one_file_are_left_alone(tmp_path: Path) -> None:
    weights = {f"model.diffusion_model.{name}": t for name, t in tiny_state_dict(tiny_config()).items()}
    weights["vae.decoder.conv_in.weight"] = torch.zeros(2)
    checkpoint = inspect_checkpoint(write_file(tmp_path / "m.safetensors", weights, tiny_config()))
    assert checkpoint.layout.prefix == "model.diffusion_model."


def test_shape_tensor_absent_or_of_another_rank(tmp_path: Path) -> None:
    weights = tiny_state_dict(tiny_config())
    flat = {**weights, "input_proj.weight": torch.zeros(128 * 128)}
    assert "not rank 2 (tensor input_proj.weight)" in str(complaint(tmp_path, flat))
    del weights["input_proj.weight"]
    assert "it lacks a tensor (tensor input_proj.weight)" in str(complaint(tmp_path, weights))
    odd = {**flat, "input_proj.weight": torch.zeros(100, 128)}
    assert "100 channels do not divide into heads of 32" in str(complaint(tmp_path, odd))
