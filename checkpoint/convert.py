"""State dicts from one layout into another.

Every function consumes its argument: a tensor leaves the old dict as soon as its successor is in the new one, so the
most that is held twice is one layer's attention weight. All of them expect names without prefix.
"""

from __future__ import annotations

import re

import torch

from .layout import ATTENTION_CONFIG

StateDict = dict[str, torch.Tensor]

E4M3_MAX = 448.0  # torch.finfo(torch.float8_e4m3fn).max

_SPLIT_QKV = re.compile(r"(?P<attention>.+\.attention)\.to_(?P<part>[qkv])\.(?P<tensor>weight|weight_scale)")
_FUSED_QKV = re.compile(r"(?P<attention>.+\.attention)\.qkv\.(?P<tensor>weight|weight_scale)")


def strip_prefix(state_dict: StateDict, prefix: str) -> StateDict:
    """The tensors whose names begin with `prefix`, without it; the others are dropped."""
    kept: StateDict = {}
    for name in list(state_dict):
        tensor = state_dict.pop(name)
        if name.startswith(prefix):
            kept[name.removeprefix(prefix)] = tensor
    return kept


def to_fused_names(state_dict: StateDict) -> StateDict:
    """diffusers' attention.to_q, .to_k, .to_v and .to_out.0 -> attention.qkv and .o; fused names pass.

    Rows of qkv are q, k and v, a third each: weights [3 hidden, hidden], row-wise fp8 scales [3 hidden].

    Raises:
        KeyError: one of the three is absent.
        ValueError: they are of different dtypes, whose join would have to be converted.
    """
    fused: StateDict = {}
    for name in list(state_dict):
        if name not in state_dict:
            continue  # k and v went with q
        match = _SPLIT_QKV.fullmatch(name)
        if match is None:
            fused[name.replace(".attention.to_out.0.", ".attention.o.")] = state_dict.pop(name)
            continue
        attention, tensor = match["attention"], match["tensor"]
        thirds = [state_dict.pop(f"{attention}.to_{part}.{tensor}") for part in "qkv"]
        if len({third.dtype for third in thirds}) > 1:
            raise ValueError(f"{attention}: q, k and v are stored in different types")
        fused[f"{attention}.qkv.{tensor}"] = torch.cat(thirds)
    return fused


def to_split_names(state_dict: StateDict) -> StateDict:
    """The reverse of `to_fused_names`; split names pass.

    q, k and v are views of one storage: no memory is taken, and safetensors asks for clones before it saves them.
    """
    split: StateDict = {}
    for name in list(state_dict):
        tensor = state_dict.pop(name)
        match = _FUSED_QKV.fullmatch(name)
        if match is None:
            split[name.replace(".attention.o.", ".attention.to_out.0.")] = tensor
            continue
        for part, third in zip("qkv", tensor.chunk(3), strict=True):
            split[f"{match['attention']}.to_{part}.{match['tensor']}"] = third
    return split


def dequantise_row_wise(state_dict: StateDict, dtype: torch.dtype = torch.bfloat16) -> StateDict:
    """Official row-wise fp8 -> plain weights; every number comes out in `dtype`, the scales are dropped.

    w = w8.to(dtype) * scale.to(dtype)[:, None], scale [out]: the scale is rounded before the product, as in the
    reference implementation's WeightOnlyFP8Linear, so that bfloat16 weights are bit-equal to those it computes with.
    """
    plain: StateDict = {}
    for name in list(state_dict):
        if name.endswith((".weight_scale", ".comfy_quant")):
            continue  # scales go with their weights; marks say how ComfyUI saved what is dequantised now
        tensor = state_dict.pop(name)
        if name.endswith(ATTENTION_CONFIG):
            plain[name] = tensor
            continue
        tensor = tensor.to(dtype)
        scale = state_dict.pop(f"{name}_scale", None)
        plain[name] = tensor if scale is None else tensor.mul_(scale.to(dtype)[:, None])
    return plain
