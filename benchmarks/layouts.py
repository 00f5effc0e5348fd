"""A row-wise fp8 transformer written in two other ways: Comfy-Org's fp8_scaled, and plain weights in fp32."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..checkpoint.convert import E4M3_MAX, StateDict, dequantise_row_wise, to_fused_names
from ..checkpoint.quantisation import fp8_mark
from ..checkpoint.shards import find_shards

_EMBEDDING = "embed_image_indicator"  # the one weight of two dimensions that is looked up, not multiplied


def dequantised(file: Path) -> StateDict:
    """The bf16 weights of a row-wise fp8 file, or of any of its shards, with fused q, k and v."""
    stored: StateDict = {}
    for shard in find_shards(file):
        stored |= load_file(str(shard))
    return dequantise_row_wise(to_fused_names(stored))


def as_scaled(weights: StateDict) -> StateDict:
    """Plain weights -> fp8 with one scale a tensor and ComfyUI's mark on it; what is no Linear's weight stays."""
    tensors: StateDict = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or module == _EMBEDDING:
            tensors[name] = weight
            continue
        scale = weight.abs().amax().float() / E4M3_MAX
        tensors[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale"] = scale
        tensors[f"{module}.comfy_quant"] = fp8_mark()
    return tensors


def as_plain(weights: StateDict) -> StateDict:
    """Either fp8 form, or bf16, as fp32: the same numbers."""
    plain: StateDict = {}
    for name, weight in weights.items():
        if name.endswith((".weight_scale", ".comfy_quant")):
            continue
        scale = weights.get(f"{name}_scale")
        plain[name] = weight.float() if scale is None else weight.float() * scale
    return plain


def write(path: Path, weights: StateDict) -> Path:
    """Saves them as a safetensors file."""
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, str(path))
    return path
