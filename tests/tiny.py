"""Tiny Ideogram 4 transformers and their files, in every published layout, made without the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

StateDict = dict[str, torch.Tensor]

FP8_MAX = 448.0  # torch.finfo(torch.float8_e4m3fn).max


def tiny_config(**changes: Any) -> dict[str, Any]:
    """diffusers' config of a transformer of 2 layers and 4 heads of 32; only in_channels is the official value."""
    return {
        "_class_name": "Ideogram4Transformer2DModel",
        "in_channels": 128,
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "intermediate_size": 192,
        "adaln_dim": 48,
        "llm_features_dim": 104,
        "rope_theta": 10_000,
        "mrope_section": [6, 5, 5],
        "norm_eps": 1e-3,
        **changes,
    }


def tiny_state_dict(config: dict[str, Any], seed: int = 0) -> StateDict:
    """Random fp32 weights under fused names: norms near 1, Linears that keep the scale of their input."""
    generator = torch.Generator().manual_seed(seed)
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    inner, adaln, llm = config["intermediate_size"], config["adaln_dim"], config["llm_features_dim"]
    state_dict: StateDict = {}

    def linear(name: str, out: int, in_: int, bias: bool = False) -> None:
        state_dict[f"{name}.weight"] = torch.randn(out, in_, generator=generator) * in_**-0.5
        if bias:
            state_dict[f"{name}.bias"] = torch.randn(out, generator=generator) * 0.02

    def norm(name: str, size: int) -> None:
        state_dict[f"{name}.weight"] = 1 + 0.1 * torch.randn(size, generator=generator)

    linear("input_proj", hidden, config["in_channels"], bias=True)
    norm("llm_cond_norm", llm)
    linear("llm_cond_proj", hidden, llm, bias=True)
    linear("t_embedding.mlp_in", hidden, hidden, bias=True)
    linear("t_embedding.mlp_out", hidden, hidden, bias=True)
    linear("adaln_proj", adaln, hidden, bias=True)
    state_dict["embed_image_indicator.weight"] = torch.randn(2, hidden, generator=generator) * 0.5
    for layer in range(config["num_layers"]):
        block = f"layers.{layer}"
        linear(f"{block}.attention.qkv", 3 * hidden, hidden)
        norm(f"{block}.attention.norm_q", config["attention_head_dim"])
        norm(f"{block}.attention.norm_k", config["attention_head_dim"])
        linear(f"{block}.attention.o", hidden, hidden)
        linear(f"{block}.feed_forward.w1", inner, hidden)
        linear(f"{block}.feed_forward.w2", hidden, inner)
        linear(f"{block}.feed_forward.w3", inner, hidden)
        for name in ("attention_norm1", "ffn_norm1", "attention_norm2", "ffn_norm2"):
            norm(f"{block}.{name}", hidden)
        linear(f"{block}.adaln_modulation", 4 * hidden, adaln, bias=True)
    linear("final_layer.linear", config["in_channels"], hidden, bias=True)
    linear("final_layer.adaln_modulation", hidden, adaln, bias=True)
    return state_dict


def split_names(state_dict: StateDict) -> StateDict:
    """The same weights (plain or row-wise fp8) under diffusers' names."""
    split: StateDict = {}
    for name, tensor in state_dict.items():
        if ".attention.qkv." in name:
            hidden = tensor.shape[0] // 3
            for i, part in enumerate(("to_q", "to_k", "to_v")):
                split[name.replace("qkv", part)] = tensor[i * hidden : (i + 1) * hidden].clone()
        else:
            split[name.replace(".attention.o.", ".attention.to_out.0.")] = tensor
    return split


def is_linear_weight(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor of a state dict is what fp8 files quantise."""
    return name.endswith(".weight") and tensor.ndim == 2 and name != "embed_image_indicator.weight"


def quantise_row_wise(state_dict: StateDict) -> StateDict:
    """The official form: e4m3 weight, F32 weight_scale [out] = row's absolute maximum / 448; the rest bf16."""
    quantised: StateDict = {}
    for name, tensor in state_dict.items():
        if not is_linear_weight(name, tensor):
            quantised[name] = tensor.to(torch.bfloat16)
            continue
        tensor = tensor.float()
        scale = tensor.abs().amax(1) / FP8_MAX
        quantised[name] = (tensor / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        quantised[f"{name}_scale"] = scale
    return quantised


def quantise_scaled(state_dict: StateDict) -> StateDict:
    """Comfy-Org's form: e4m3 weight, one F32 weight_scale [], comfy_quant; the rest bf16."""
    quantised: StateDict = {}
    for name, tensor in state_dict.items():
        if not is_linear_weight(name, tensor):
            quantised[name] = tensor.to(torch.bfloat16)
            continue
        tensor = tensor.float()
        scale = tensor.abs().amax() / FP8_MAX
        quantised[name] = (tensor / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        quantised[f"{name}_scale"] = scale
        form = json.dumps({"format": "float8_e4m3fn"}).encode()
        quantised[f"{name.removesuffix('weight')}comfy_quant"] = torch.tensor(list(form), dtype=torch.uint8)
    return quantised


def dequantise(state_dict: StateDict, dtype: torch.dtype = torch.bfloat16) -> StateDict:
    """fp32 weights with the values that either fp8 form stands for, scale and product rounded to `dtype`."""
    plain: StateDict = {}
    for name, tensor in state_dict.items():
        if name.endswith(("_scale", ".comfy_quant")):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            scale = state_dict[f"{name}_scale"].to(dtype)
            tensor = tensor.to(dtype) * (scale[:, None] if scale.ndim else scale)
        plain[name] = tensor.to(torch.float32)
    return plain


def write_file(
    path: Path, state_dict: StateDict, config: dict[str, Any] | None = None, metadata: dict[str, str] | None = None
) -> Path:
    """Saves the file and, where a config is given, config.json beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state_dict, str(path), metadata=metadata)
    if config is not None:
        path.with_name("config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
