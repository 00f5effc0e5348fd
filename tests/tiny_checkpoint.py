"""An untrained Ideogram 4 of a few megabytes, written in seconds in the layout of the official row-wise fp8 release.

It stands in for the real one where that is absent: every part has its kind, its names and its dtypes, none its size.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler
from ideogram4_fusion.checkpoint.completeness import linear_shapes, other_shapes
from ideogram4_fusion.checkpoint.dimensions import Dimensions
from ideogram4_fusion.demo_model.parts import DIFFUSERS_FILE, write_part
from ideogram4_fusion.demo_model.text_encoder import LAYERS, TAPS, text_config
from ideogram4_fusion.tests.tiny_tokenizer import VOCABULARY_SIZE, tiny_tokenizer
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3VLModel

_TEXT_WIDTH = 32
_CONTRAST = 0.3  # of the decoder's last layer: about 1 % of the values are then cut off at black and white

DIMENSIONS = Dimensions(
    in_channels=128,
    num_layers=2,
    num_attention_heads=4,
    attention_head_dim=32,
    intermediate_size=256,
    adaln_dim=32,
    llm_features_dim=TAPS * _TEXT_WIDTH,
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
    write_part(folder, DIFFUSERS_FILE, tensors, list(shapes), config)


def _write_text_encoder(folder: Path, generator: torch.Generator) -> None:
    config = text_config(VOCABULARY_SIZE, _TEXT_WIDTH)
    with torch.device("meta"):
        model = Qwen3VLModel(config)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    tensors = {name: _random(parameter.shape, generator) for name, parameter in model.named_parameters()}
    for name, tensor in tensors.items():
        if "norm" in name and name.endswith(".weight"):
            tensor.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor /= math.sqrt(2 * LAYERS)  # keeps the sum over all residual branches near one
    tensors["language_model.embed_tokens.weight"] *= math.sqrt(_TEXT_WIDTH)
    write_part(folder, "model.safetensors", tensors, linears, config.to_dict())


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
    save_file(tensors, folder / DIFFUSERS_FILE)


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Normal, with a variance that keeps that of the input, [out, in, ...] as in Linear and Conv."""
    return torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))


def _smooth(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random from channel to channel, a binomial window 1 2 1 in both directions: soft clouds, no grain."""
    window = torch.tensor([0.25, 0.5, 0.25])
    return 2.0 * _random(shape[:2], generator)[:, :, None, None] * torch.outer(window, window)
