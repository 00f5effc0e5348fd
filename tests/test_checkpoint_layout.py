"""Which layout a file has, and the refusals of those that the pack does not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ideogram4_fusion.checkpoint.errors import CheckpointError
from ideogram4_fusion.checkpoint.header import read_header
from ideogram4_fusion.checkpoint.inspection import inspect_checkpoint
from ideogram4_fusion.checkpoint.layout import PREFIXES, Layout, identify
from ideogram4_fusion.tests.tiny import (
    StateDict,
    quantise_row_wise,
    quantise_scaled,
    split_names,
    tiny_config,
    tiny_state_dict,
    write_file,
)

QKV = "layers.0.attention.qkv.weight"


@pytest.fixture
def weights() -> StateDict:
    return {name: tensor.to(torch.bfloat16) for name, tensor in tiny_state_dict(tiny_config(num_layers=1)).items()}


def layout_of(folder: Path, tensors: StateDict, metadata: dict[str, str] | None = None) -> Layout:
    return identify(read_header(write_file(folder / "model.safetensors", tensors, metadata=metadata)))


def legacy(scaled: StateDict) -> StateDict:
    """The form of per-tensor fp8 before comfy_quant."""
    tensors = {
        name.replace(".weight_scale", ".scale_weight"): tensor
        for name, tensor in scaled.items()
        if not name.endswith(".comfy_quant")
    }
    return {**tensors, "scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}


def in_metadata(scaled: StateDict) -> tuple[StateDict, dict[str, str]]:
    """The form whose marks are in the metadata."""
    layers = {
        name.removesuffix(".comfy_quant"): {"format": "float8_e4m3fn"}
        for name in scaled
        if name.endswith(".comfy_quant")
    }
    tensors = {name: tensor for name, tensor in scaled.items() if not name.endswith(".comfy_quant")}
    return tensors, {"_quantization_metadata": json.dumps({"layers": layers})}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes(tmp_path: Path, weights: StateDict, prefix: str) -> None:
    found = layout_of(tmp_path, {prefix + name: tensor for name, tensor in weights.items()})
    assert found == Layout(prefix, "fused", "plain", "BF16", None)


def test_plain(tmp_path: Path, weights: StateDict) -> None:
    half = split_names({name: tensor.half() for name, tensor in weights.items()})
    found = layout_of(tmp_path, half)
    assert found == Layout("", "split", "plain", "F16", None)
    assert found.describe() == "fp16 weights, split q, k, v"


def test_row_wise(tmp_path: Path, weights: StateDict) -> None:
    found = layout_of(tmp_path, quantise_row_wise(weights))
    assert found == Layout("", "fused", "fp8_row_wise", "F8_E4M3", "weight_scale")
    assert found.describe() == "official row-wise fp8, fused qkv"
    split = layout_of(tmp_path, split_names(quantise_row_wise(weights)))
    assert (split.naming, split.weights) == ("split", "fp8_row_wise")


def test_scaled_in_its_three_forms(tmp_path: Path, weights: StateDict) -> None:
    scaled = quantise_scaled(weights)
    assert layout_of(tmp_path, scaled) == Layout("", "fused", "fp8_scaled", "F8_E4M3", "weight_scale")
    assert layout_of(tmp_path, legacy(scaled)) == Layout("", "fused", "fp8_scaled", "F8_E4M3", "scale_weight")
    tensors, metadata = in_metadata(scaled)
    assert layout_of(tmp_path, tensors, metadata).weights == "fp8_scaled"


def refusal(folder: Path, tensors: StateDict, metadata: dict[str, str] | None = None) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        layout_of(folder, tensors, metadata)
    assert str(folder / "model.safetensors") in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("transformer.layers.0.attention.to_q.lora_A.weight", "a LoRA"),
        ("lora_unet_layers_0_attention_qkv.lora_down.weight", "a LoRA"),
        ("diffusion_model.layers.0.attention.qkv.lokr_w1", "a LoRA"),
        ("decoder.conv_in.weight", "a VAE"),
        ("model.layers.0.self_attn.q_proj.weight", "a text encoder"),
        ("language_model.embed_tokens.weight", "a text encoder"),
    ],
)
def test_other_kinds_of_file_are_named(tmp_path: Path, key: str, words: str) -> None:
    error = refusal(tmp_path, {key: torch.zeros(2, 2)})
    assert words in str(error)
    assert error.key == key


def test_another_model_is_told_what_it_lacks(tmp_path: Path, weights: StateDict) -> None:
    del weights["llm_cond_norm.weight"]
    assert "it lacks llm_cond_norm.weight." in str(refusal(tmp_path, weights))
    error = refusal(tmp_path, {"double_blocks.0.img_attn.qkv.weight": torch.zeros(2, 2)})
    assert "it lacks embed_image_indicator.weight, layers.0.adaln_modulation.weight, llm_cond_norm.weight." in str(
        error
    )


def test_all_in_one_checkpoint_of_another_model_is_not_called_a_vae(tmp_path: Path) -> None:
    tensors = {
        "model.diffusion_model.input_blocks.0.0.weight": torch.zeros(2, 2),
        "first_stage_model.encoder.conv_in.weight": torch.zeros(2, 2),
    }
    assert "this is no Ideogram 4 transformer" in str(refusal(tmp_path, tensors))


def test_unknown_prefix_and_two_transformers(tmp_path: Path, weights: StateDict) -> None:
    other = {f"net.{name}": tensor for name, tensor in weights.items()}
    assert "begin with 'net.'" in str(refusal(tmp_path, other))
    both = {prefix + name: tensor.clone() for prefix in ("", "transformer.") for name, tensor in weights.items()}
    assert "holds 2 transformers" in str(refusal(tmp_path, both))


def test_bitsandbytes(tmp_path: Path, weights: StateDict) -> None:
    weights[QKV] = torch.zeros(weights[QKV].numel() // 2, 1, dtype=torch.uint8)
    weights[f"{QKV}.quant_state.bitsandbytes__nf4"] = torch.zeros(8, dtype=torch.uint8)
    assert "bitsandbytes (NF4)" in str(refusal(tmp_path, weights))


def test_what_core_loads_is_sent_to_core(tmp_path: Path, weights: StateDict) -> None:
    weights[QKV] = torch.zeros(weights[QKV].shape, dtype=torch.float8_e5m2)
    weights["layers.0.attention.qkv.comfy_quant"] = torch.zeros(8, dtype=torch.uint8)
    message = str(refusal(tmp_path, weights))
    assert "quantised as F8_E5M2" in message
    assert "Load Diffusion Model node loads" in message


def test_mxfp8_and_formats_named_in_metadata_are_sent_to_core(tmp_path: Path, weights: StateDict) -> None:
    blocks = {**weights, QKV: weights[QKV].to(torch.float8_e4m3fn)}
    blocks["layers.0.attention.qkv.weight_scale"] = torch.zeros(384, 4, dtype=torch.uint8)
    blocks["layers.0.attention.qkv.comfy_quant"] = torch.zeros(8, dtype=torch.uint8)
    assert "quantised as mxfp8" in str(refusal(tmp_path, blocks))
    layers = {"layers": {"layers.0.attention.qkv": {"format": "convrot_w4a4"}}}
    error = refusal(tmp_path, weights, {"_quantization_metadata": json.dumps(layers)})
    assert "quantised as convrot_w4a4" in str(error)
    for text in ("{", '{"layers":' * 100_000):
        assert "cannot be read" in str(refusal(tmp_path, weights, {"_quantization_metadata": text}))


def test_metadata_that_calls_a_plain_weight_fp8(tmp_path: Path, weights: StateDict) -> None:
    layers = {"layers": {"layers.0.attention.qkv": {"format": "float8_e4m3fn"}}}
    error = refusal(tmp_path, weights, {"_quantization_metadata": json.dumps(layers)})
    assert "its metadata says float8_e4m3fn of a weight in BF16" in str(error)
    assert error.key == QKV


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (b'{"format": "int8_tensorwise"}', "says 'int8_tensorwise'"),
        (b'{"format": "float8_e5m2"}', "says 'float8_e5m2'"),
        (b'{"format": ["float8_e4m3fn"]}', "says ['float8_e4m3fn']"),
        (b"\xff\x00garbage", "cannot be read"),
        (b"", "cannot be read"),
        (b"[1]", "cannot be read"),
        (b"{}", "cannot be read"),
        (b'{"a":' * 10_000, "cannot be read"),
    ],
    ids=["int8", "e5m2", "list", "garbage", "empty", "array", "no format", "nested"],
)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_mark_that_says_another_format(
    tmp_path: Path, weights: StateDict, mark: bytes, words: str, prefix: str
) -> None:
    key = f"{prefix}layers.0.attention.qkv.comfy_quant"
    scaled = {prefix + name: tensor for name, tensor in quantise_scaled(weights).items()}
    file = tmp_path / "model.safetensors"
    inspect_checkpoint(write_file(file, scaled, tiny_config(num_layers=1)))
    scaled[key] = torch.tensor(list(mark), dtype=torch.uint8)
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(write_file(file, scaled))
    assert words in str(caught.value)
    assert (caught.value.file, caught.value.key) == (file, key)


def test_a_mark_that_is_no_bytes(tmp_path: Path, weights: StateDict) -> None:
    """Found by mutating headers: core's loader died of it."""
    scaled = quantise_scaled(weights)
    key = "layers.0.attention.qkv.comfy_quant"
    scaled[key] = scaled[key].view(torch.float8_e4m3fn)
    file = write_file(tmp_path / "model.safetensors", scaled, tiny_config(num_layers=1))
    with pytest.raises(CheckpointError, match="is stored as F8_E4M3") as caught:
        inspect_checkpoint(file)
    assert caught.value.key == key


def test_integer_weights_of_an_unknown_tool(tmp_path: Path, weights: StateDict) -> None:
    weights[QKV] = torch.zeros(weights[QKV].shape, dtype=torch.uint8)
    assert "packed as U8 by a tool unknown here" in str(refusal(tmp_path, weights))


def test_fp8_without_scales(tmp_path: Path, weights: StateDict) -> None:
    row_wise = quantise_row_wise(weights)
    del row_wise[f"{QKV}_scale"]
    error = refusal(tmp_path, row_wise)
    assert "an fp8 weight without its weight_scale" in str(error)
    assert error.key == QKV


def test_per_tensor_scale_without_its_mark(tmp_path: Path, weights: StateDict) -> None:
    scaled = quantise_scaled(weights)
    del scaled["layers.0.attention.qkv.comfy_quant"]
    assert refusal(tmp_path, scaled).key == "layers.0.attention.qkv.comfy_quant"


def test_scales_of_unknown_shape_or_two_kinds(tmp_path: Path, weights: StateDict) -> None:
    row_wise = quantise_row_wise(weights)
    blocks = {**row_wise, f"{QKV}_scale": torch.ones(384, 8)}
    assert "neither [] for a tensor nor [" in str(refusal(tmp_path, blocks))
    # The older marks mean one scale a tensor; nothing was ever published with them and a scale a row.
    assert "neither [] for a tensor nor [" in str(refusal(tmp_path, legacy(row_wise)))
    mixed = {**quantise_scaled(weights), f"{QKV}_scale": row_wise[f"{QKV}_scale"]}
    assert "mixes per-tensor and row-wise fp8" in str(refusal(tmp_path, mixed))


def test_mixed_names_of_attention(tmp_path: Path) -> None:
    weights = tiny_state_dict(tiny_config())
    mixed = {**split_names(weights), "layers.1.attention.qkv.weight": weights["layers.1.attention.qkv.weight"]}
    for part in ("to_q", "to_k", "to_v"):
        del mixed[f"layers.1.attention.{part}.weight"]
    message = str(refusal(tmp_path, mixed))
    assert "mixes two spellings of attention" in message
    assert "layers.1.attention.qkv.weight" in message


def test_no_attention_weights(tmp_path: Path, weights: StateDict) -> None:
    rest = {name: tensor for name, tensor in weights.items() if not name.endswith((".qkv.weight", ".o.weight"))}
    assert "no layer has attention weights" in str(refusal(tmp_path, rest))


def test_per_tensor_fp8_cannot_be_split(tmp_path: Path, weights: StateDict) -> None:
    assert "three scales cannot become the one" in str(refusal(tmp_path, quantise_scaled(split_names(weights))))
