"""An untrained Ideogram 4 of a few megabytes, written in seconds in the layout of the official row-wise fp8 release.

It stands in for the real one where that is absent: every part has its kind, its names and its dtypes, none its size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLModel

from ...checkpoint.completeness import linear_shapes, other_shapes
from ...checkpoint.convert import E4M3_MAX, StateDict
from ...checkpoint.dimensions import Dimensions
from .tiny_tokenizer import VOCABULARY_SIZE, tiny_tokenizer

_TAPS = 13  # layers of the text encoder whose outputs become features of a text token
_TEXT_LAYERS = 36  # the last tap is the output of layer 35
_TEXT_WIDTH = 32
_CONTRAST = 0.3  # of the decoder's last layer: about 1 % of the values are then cut off at black and white
_DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"

DIMENSIONS = Dimensions(
    in_channels=128,
    num_layers=2,
    num_attention_heads=4,
    attention_head_dim=32,
    intermediate_size=256,
    adaln_dim=32,
    llm_features_dim=_TAPS * _TEXT_WIDTH,
    rope_theta=5_000_000,
    mrope_section=(6, 5, 5),
    norm_eps=1e-5,
)


def write_tiny_checkpoint(folder: Path, seed: int = 0) -> None:
    """Writes both transformers, text_encoder, vae, tokenizer and scheduler into `folder`, over what it holds of them.

    Raises:
        OSError: the folder cannot be written.
    """
    generator = torch.Generator().manual_seed(seed)
    _write_transformer(folder / "transformer", generator)
    _write_text_encoder(folder / "text_encoder", generator)
    _write_vae(folder / "vae", generator)
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    _write_transformer(folder / "unconditional_transformer", generator)


def quantise_row_wise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [O, I] -> float8_e4m3fn [O, I] and float32 scale [O] = largest magnitude of a row / 448.

    Source: the official release's weights, w = w8 * scale.
    """
    scale = (weight.float().abs().amax(dim=1) / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


def _write_transformer(folder: Path, generator: torch.Generator) -> None:
    shapes = linear_shapes(DIMENSIONS, "fused")
    tensors = {f"{name}.weight": _random(shape, generator) for name, shape in shapes.items()}
    # Velocity = -(the token itself, normalised) + what the blocks add: untrained or not, it takes the noise away, and
    # the picture is the blocks' doing.
    tensors["input_proj.weight"] = torch.eye(DIMENSIONS.hidden_size, DIMENSIONS.in_channels)
    tensors["final_layer.linear.weight"] = -torch.eye(DIMENSIONS.in_channels, DIMENSIONS.hidden_size)
    for name, shape in other_shapes(DIMENSIONS, "fused").items():
        tensors[name] = float("norm" in name) + 0.1 * torch.randn(shape, generator=generator)
    config = {"_class_name": "Ideogram4Transformer2DModel", **DIMENSIONS.as_config()}
    write_part(folder, _DIFFUSERS_FILE, tensors, list(shapes), config)


def _write_text_encoder(folder: Path, generator: torch.Generator) -> None:
    config = _text_config()
    with torch.device("meta"):
        model = Qwen3VLModel(config)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    tensors = {name: _random(parameter.shape, generator) for name, parameter in model.named_parameters()}
    for name, tensor in tensors.items():
        if "norm" in name and name.endswith(".weight"):
            tensor.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor /= math.sqrt(2 * _TEXT_LAYERS)  # keeps the sum over all residual branches near one
    tensors["language_model.embed_tokens.weight"] *= math.sqrt(_TEXT_WIDTH)
    write_part(folder, "model.safetensors", tensors, linears, config.to_dict())


def _text_config() -> Qwen3VLConfig:
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": _TEXT_WIDTH,
            "intermediate_size": 2 * _TEXT_WIDTH,
            "num_hidden_layers": _TEXT_LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": VOCABULARY_SIZE,
            "max_position_embeddings": 4096,
            "rope_scaling": {
                "rope_type": "default",
                "rope_theta": 5_000_000,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": _TEXT_WIDTH,
            "num_heads": 2,
            "intermediate_size": _TEXT_WIDTH,
            "out_hidden_size": _TEXT_WIDTH,
            "deepstack_visual_indexes": [0],
        },
    )
    config.architectures = ["Qwen3VLModel"]
    return config


def _write_vae(folder: Path, generator: torch.Generator) -> None:
    # 32 groups and widths that are multiples of the first: what ComfyUI's VAE classes can be built with.
    vae = AutoencoderKLFlux2(block_out_channels=(32, 64, 64, 64), norm_num_groups=32, layers_per_block=1)
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if "norm" in name and name.endswith(".weight") else 0.0)
            elif parameter.shape[2:] == (3, 3):
                parameter.copy_(_smooth(parameter.shape, generator))
            else:
                parameter.copy_(_random(parameter.shape, generator))
        vae.decoder.conv_out.weight *= _CONTRAST
    vae.save_config(folder)
    tensors = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in vae.state_dict().items()}
    save_file(tensors, folder / _DIFFUSERS_FILE)


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Normal, with a variance that keeps that of the input, [out, in, ...] as in Linear and Conv."""
    return torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))


def _smooth(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random from channel to channel, a binomial window 1 2 1 in both directions: soft clouds, no grain."""
    window = torch.tensor([0.25, 0.5, 0.25])
    return 2.0 * _random(shape[:2], generator)[:, :, None, None] * torch.outer(window, window)


def write_part(
    folder: Path, file: str, tensors: StateDict, linears: Collection[str], config: Mapping[str, Any]
) -> None:
    """Writes the weights of `linears` as row-wise fp8, the other tensors as bfloat16, the config beside them."""
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    for module in linears:
        name = f"{module}.weight"
        stored[name], stored[f"{name}_scale"] = quantise_row_wise(tensors[name])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / file)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
