"""Ideogram 4's text encoder as Hugging Face stores it: the language model of a Qwen3-VL of any size, and its sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import read_config
from .errors import CheckpointError
from .expectations import FLOATS, Expectations
from .folder import model_file
from .header import Header, read_header
from .quantisation import BITSANDBYTES, is_row_wise
from .shards import find_shards

# transformers' Qwen3VLModel, and Qwen3VLForConditionalGeneration around it.
_PREFIXES = ("language_model.", "model.language_model.")
_EMBEDDING = "embed_tokens.weight"

TAPPED_LAYERS = 36  # the last of the thirteen taps is the output of layer 35
TAPS = 13

# Qwen3-VL-8B-Instruct: heads of 128, and what its config.json says that no tensor shows.
_OFFICIAL_HEAD_DIM = 128
_OFFICIAL: Mapping[str, Any] = {"rope_theta": 5_000_000, "rms_norm_eps": 1e-6, "mrope_section": (24, 20, 20)}

_ADVICE = "Download this folder again, config.json included."


@dataclass(frozen=True)
class TextDimensions:
    """A language model's sizes, under transformers' names (`Qwen3VLTextConfig`).

    Attributes:
        vocab_size: tokens.
        hidden_size: channels of a token.
        intermediate_size: width inside the SwiGLU feed-forward.
        num_hidden_layers: blocks.
        num_attention_heads: heads of queries.
        num_key_value_heads: heads of keys and values.
        head_dim: channels of one head.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: epsilon of all norms.
        mrope_section: frequencies for time, height and width; text alone does not tell them apart.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    mrope_section: tuple[int, ...]

    @property
    def features(self) -> int:
        """Channels of one token's features, all taps together."""
        return TAPS * self.hidden_size


@dataclass(frozen=True)
class TextEncoder:
    """A file, or the shards of one, proven to hold a complete language model.

    Attributes:
        header: of the files; beside the language model they may hold the vision tower and the head.
        prefix: what stands before the language model's names.
        row_wise: whether it is fp8 with a scale a row, as the official one.
        dtype: safetensors' name of the dtype of what is not fp8, of the embedding that is.
        dimensions: its sizes.
    """

    header: Header
    prefix: str
    row_wise: bool
    dtype: str
    dimensions: TextDimensions

    def describe(self) -> str:
        """Such as "row-wise fp8, 36 layers x 4096"."""
        weights = "row-wise fp8" if self.row_wise else {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}[self.dtype]
        return f"{weights}, {self.dimensions.num_hidden_layers} layers x {self.dimensions.hidden_size}"


def inspect_text_encoder(folder: Path) -> TextEncoder:
    """Reads the headers and the config.json in a folder; no weights.

    Raises:
        CheckpointError: they do not hold a complete Qwen3-VL language model of at least 36 layers, plain or in
            row-wise fp8.
    """
    header = read_header(find_shards(model_file(folder)))
    prefix = next((p for p in _PREFIXES if p + _EMBEDDING in header.tensors), None)
    if prefix is None:
        raise CheckpointError(
            header.file,
            f"this is no Qwen3-VL under Hugging Face's names: it lacks {_PREFIXES[0]}{_EMBEDDING}",
            "Put the text_encoder/ of ideogram-ai/ideogram-4-fp8 there. A single file for ComfyUI goes into "
            "models/text_encoders, for Load CLIP.",
        )
    found = {name.removeprefix(prefix): info for name, info in header.tensors.items() if name.startswith(prefix)}
    packed = next((name for name in found if name.endswith(BITSANDBYTES)), None)
    if packed is not None:
        raise CheckpointError(
            header.file,
            "it is packed by bitsandbytes (NF4), which ComfyUI cannot compute with",
            "Put the text_encoder/ of ideogram-ai/ideogram-4-fp8 there, or a bf16 one.",
            prefix + packed,
        )
    row_wise = is_row_wise(header)
    dimensions = _dimensions(header, prefix, _text_config(folder))
    tensors = Expectations(found)
    for name, shape in _linears(dimensions).items():
        weight = found.get(f"{name}.weight")
        is_fp8 = weight is not None and weight.dtype == "F8_E4M3"
        tensors.expect(f"{name}.weight", (shape,), ("F8_E4M3",) if is_fp8 else FLOATS)
        if is_fp8:
            tensors.expect(f"{name}.weight_scale", (shape[:1],), ("F32",))
    for name, other in _others(dimensions).items():
        tensors.expect(name, (other,))
    tensors.allow("norm.weight")  # the taps are taken in front of it
    tensors.settle(header, prefix, _ADVICE)
    return TextEncoder(header, prefix, row_wise, found[_EMBEDDING].dtype, dimensions)


def _linears(dims: TextDimensions) -> dict[str, tuple[int, int]]:
    """Module name -> [out, in], as transformers' Qwen3VLTextModel has them."""
    hidden, inner = dims.hidden_size, dims.intermediate_size
    queries, keys = dims.num_attention_heads * dims.head_dim, dims.num_key_value_heads * dims.head_dim
    shapes = {}
    for layer in range(dims.num_hidden_layers):
        block = f"layers.{layer}"
        shapes[f"{block}.self_attn.q_proj"] = (queries, hidden)
        shapes[f"{block}.self_attn.k_proj"] = (keys, hidden)
        shapes[f"{block}.self_attn.v_proj"] = (keys, hidden)
        shapes[f"{block}.self_attn.o_proj"] = (hidden, queries)
        shapes[f"{block}.mlp.gate_proj"] = (inner, hidden)
        shapes[f"{block}.mlp.up_proj"] = (inner, hidden)
        shapes[f"{block}.mlp.down_proj"] = (hidden, inner)
    return shapes


def _others(dims: TextDimensions) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (dims.vocab_size, dims.hidden_size)}
    for layer in range(dims.num_hidden_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{layer}.{norm}.weight"] = (dims.hidden_size,)
        for norm in ("self_attn.q_norm", "self_attn.k_norm"):
            shapes[f"layers.{layer}.{norm}.weight"] = (dims.head_dim,)
    return shapes


def _text_config(folder: Path) -> Mapping[str, Any]:
    config = read_config(folder)
    if config is None:
        return {}
    text = config.get("text_config", config) if isinstance(config, dict) else None
    if not isinstance(text, dict):
        raise CheckpointError(folder / "config.json", "it describes no language model", _ADVICE)
    return text


def _dimensions(header: Header, prefix: str, config: Mapping[str, Any]) -> TextDimensions:
    def shape(name: str, rank: int) -> tuple[int, ...]:
        info = header.tensors.get(prefix + name)
        if info is None or len(info.shape) != rank or 0 in info.shape:
            problem = "it lacks a tensor" if info is None else f"a tensor of shape {list(info.shape)}"
            raise CheckpointError(header.file, problem, _ADVICE, prefix + name)
        return info.shape

    vocabulary, hidden = shape(_EMBEDDING, 2)
    (head,) = shape("layers.0.self_attn.q_norm.weight", 1)
    blocks = prefix + "layers."
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": shape("layers.0.mlp.gate_proj.weight", 2)[0],
        "num_hidden_layers": len({n[len(blocks) :].partition(".")[0] for n in header.tensors if n.startswith(blocks)}),
        "num_attention_heads": shape("layers.0.self_attn.q_proj.weight", 2)[0] // head,
        "num_key_value_heads": shape("layers.0.self_attn.k_proj.weight", 2)[0] // head,
        "head_dim": head,
    }
    for name, size in sizes.items():
        if name in config and config[name] != size:
            raise CheckpointError(
                header.file, f"its config says {name} is {config[name]!r}, the tensors say {size}", _ADVICE
            )
    heads, shared = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if not shared or heads % shared or head % 2:
        raise CheckpointError(header.file, f"{heads} heads of {head} cannot share {shared} keys", _ADVICE)
    if sizes["num_hidden_layers"] < TAPPED_LAYERS:
        raise CheckpointError(
            header.file,
            f"it has {sizes['num_hidden_layers']} layers, Ideogram 4 takes features of {TAPPED_LAYERS}",
            _ADVICE,
        )
    return TextDimensions(**sizes, **_unseen(header, config, head))


def _unseen(header: Header, config: Mapping[str, Any], head: int) -> dict[str, Any]:
    """What no tensor shows. transformers has moved the rotation within its config twice."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(header.file, "its config.json describes a rotation that is no mapping", _ADVICE)
    found = {name: value for name in _OFFICIAL for value in (config.get(name), rope.get(name)) if value is not None}
    if head == _OFFICIAL_HEAD_DIM:
        found = {**_OFFICIAL, **found}
    absent = [name for name in _OFFICIAL if name not in found]
    if absent:
        raise CheckpointError(header.file, f"its config.json does not say {', '.join(absent)}", _ADVICE)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise CheckpointError(header.file, f"its rotation is {kind!r}, which ComfyUI's Qwen3-VL does not have", _ADVICE)
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(header.file, f"its activation is {config['hidden_act']!r}, not silu", _ADVICE)
    theta, eps, section = found["rope_theta"], found["rms_norm_eps"], found["mrope_section"]
    if not all(type(value) in (int, float) and math.isfinite(value) and value > 0 for value in (theta, eps)):
        raise CheckpointError(header.file, f"rope_theta {theta!r} and rms_norm_eps {eps!r} are not positive", _ADVICE)
    if not isinstance(section, (list, tuple)) or not all(type(length) is int for length in section):
        raise CheckpointError(header.file, f"mrope_section is {section!r}, not a list of lengths", _ADVICE)
    return {"rope_theta": float(theta), "rms_norm_eps": float(eps), "mrope_section": tuple(section)}
