"""Conversions between the layouts, against weights written out by the tests themselves."""

from __future__ import annotations

import pytest
import torch
from ideogram4_fusion.checkpoint.convert import dequantise_row_wise, strip_prefix, to_fused_names, to_split_names
from ideogram4_fusion.tests.tiny import (
    StateDict,
    dequantise,
    quantise_row_wise,
    split_names,
    tiny_config,
    tiny_state_dict,
)


@pytest.fixture
def weights() -> StateDict:
    return tiny_state_dict(tiny_config())


def assert_same(one: StateDict, other: StateDict) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        # fp8 has no comparison on every device; its bytes do.
        assert torch.equal(tensor.contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("row_wise", [False, True])
def test_fused_and_split_names(weights: StateDict, row_wise: bool) -> None:
    fused = quantise_row_wise(weights) if row_wise else weights
    split = split_names(fused)
    assert_same(to_fused_names(dict(split)), fused)
    assert_same(to_split_names(dict(fused)), split)
    # What has the names already stays as it is.
    assert_same(to_fused_names(dict(fused)), fused)
    assert_same(to_split_names(dict(split)), split)


def test_order_of_the_keys_does_not_matter(weights: StateDict) -> None:
    split = split_names(weights)
    assert_same(to_fused_names({name: split[name] for name in sorted(split, reverse=True)}), weights)


def test_a_missing_third_is_no_silent_loss(weights: StateDict) -> None:
    split = split_names(weights)
    del split["layers.1.attention.to_k.weight"]
    with pytest.raises(KeyError, match=r"layers\.1\.attention\.to_k\.weight"):
        to_fused_names(split)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantised_bits(weights: StateDict, dtype: torch.dtype) -> None:
    quantised = quantise_row_wise(weights)
    expected = {name: tensor.to(dtype) for name, tensor in dequantise(quantised, dtype).items()}
    assert_same(dequantise_row_wise(dict(quantised), dtype), expected)


def test_dequantised_weights_are_near_the_ones_before(weights: StateDict) -> None:
    """e4m3 has 3 bits of mantissa: half a step is 2^-4 of a normal value, and half a step of the smallest is 2^-10."""
    plain = dequantise_row_wise(quantise_row_wise(weights), torch.float32)
    name = "layers.0.attention.qkv.weight"
    scale = weights[name].abs().amax(1, keepdim=True) / 448
    bound = torch.maximum(weights[name].abs() * 2**-4, scale * 2**-10) * (1 + 1e-5)
    assert bool(((plain[name] - weights[name]).abs() <= bound).all())


def test_norms_and_biases_come_out_in_the_dtype_too(weights: StateDict) -> None:
    quantised = {**quantise_row_wise(weights), "llm_cond_norm.weight": weights["llm_cond_norm.weight"]}
    plain = dequantise_row_wise(quantised)
    assert {tensor.dtype for tensor in plain.values()} == {torch.bfloat16}
    assert plain.keys() == weights.keys()


def test_arguments_are_consumed(weights: StateDict) -> None:
    quantised = split_names(quantise_row_wise(weights))
    fused = to_fused_names(quantised)
    assert quantised == {}
    dequantise_row_wise(fused)
    assert fused == {}


def test_strip_prefix() -> None:
    tensor = torch.zeros(1)
    assert strip_prefix({"model.a": tensor, "vae.b": tensor, "amodel.c": tensor}, "model.") == {"a": tensor}


def test_split_weights_run_in_diffusers(weights: StateDict) -> None:
    """The names are those of diffusers' class, and q, k, v go where it expects them: strict loading, finite output."""
    models = pytest.importorskip("diffusers.models.transformers.transformer_ideogram4")
    config = {name: value for name, value in tiny_config().items() if not name.startswith("_")}
    model = models.Ideogram4Transformer2DModel(**config)
    model.load_state_dict(to_split_names(dict(weights)), strict=True)
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    for i, part in enumerate(("to_q", "to_k", "to_v")):
        linear = getattr(model.layers[1].attention, part)
        assert torch.equal(linear.weight, weights["layers.1.attention.qkv.weight"][i * hidden : (i + 1) * hidden])
