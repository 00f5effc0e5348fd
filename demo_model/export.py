"""Writes the parts of a checkpoint folder, in the layout of the official row-wise fp8 release.

    python -m ideogram4_fusion.demo_model.export STATE FOLDER

STATE is what `train` leaves: float32 weights of the VAE and the transformer. Everything else is made here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file

from ..checkpoint.completeness import linear_shapes
from ..checkpoint.convert import to_fused_names
from .autoencoder import new_autoencoder
from .parts import DIFFUSERS_FILE, write_part
from .text_encoder import random_weights, text_config
from .tokenizer import make_tokenizer
from .transformer import DIMENSIONS

TRANSFORMER_STATE, AUTOENCODER_STATE = "transformer.safetensors", "vae.safetensors"

_TOKENIZER_CLASS = "PreTrainedTokenizerFast"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    autoencoder = new_autoencoder()
    autoencoder.load_state_dict(load_file(options.state / AUTOENCODER_STATE))
    write_text_parts(options.folder)
    write_autoencoder(options.folder, autoencoder)
    write_transformer(options.folder, load_file(options.state / TRANSFORMER_STATE))


def write_text_parts(folder: Path) -> None:
    """tokenizer/, text_encoder/ and scheduler/, none of which is trained."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    settings = folder / "tokenizer" / "tokenizer_config.json"
    # Transformers 5 writes a class that version 4, which a ComfyUI may have, does not know.
    _write_json(settings, {**json.loads(settings.read_text(encoding="utf-8")), "tokenizer_class": _TOKENIZER_CLASS})
    config = text_config(len(tokenizer))
    weights, linears = random_weights(config, tokenizer)
    write_part(folder / "text_encoder", "model.safetensors", weights, linears, config.to_dict())
    FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")


def write_autoencoder(folder: Path, autoencoder: AutoencoderKLFlux2) -> None:
    """vae/, in bfloat16."""
    autoencoder.save_config(folder / "vae")
    tensors = {
        name: tensor.to("cpu", torch.bfloat16 if tensor.is_floating_point() else None).contiguous()
        for name, tensor in autoencoder.state_dict().items()
    }
    save_file(tensors, folder / "vae" / DIFFUSERS_FILE)


def write_transformer(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """transformer/, of weights under diffusers' names: fused, its Linears row-wise fp8, the rest bfloat16."""
    fused = to_fused_names({name: weight.float().cpu() for name, weight in weights.items()})
    config = {"_class_name": "Ideogram4Transformer2DModel", **DIMENSIONS.as_config()}
    write_part(folder / "transformer", DIFFUSERS_FILE, fused, linear_shapes(DIMENSIONS, "fused"), config)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
