"""Writes one part of a checkpoint folder in the layout of the official row-wise fp8 release."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..checkpoint.convert import E4M3_MAX, StateDict

DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"


def quantise_row_wise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [O, I] -> float8_e4m3fn [O, I] and float32 scale [O] = largest magnitude of a row / 448.

    Source: the official release's weights, w = w8 * scale.
    """
    scale = (weight.float().abs().amax(dim=1) / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


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
