"""What a LoRA's layers are multiplied by, where diffusers has put it into the file's metadata.

Source: PEFT's `LoraConfig` and `get_pattern_key`: alpha / rank, with `use_rslora` alpha / sqrt(rank); `alpha_pattern`
maps the end of a module's name, as a regular expression, to an alpha of its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import torch

_DOWN = ".lora_A.weight"


def metadata_alphas(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> dict[str, torch.Tensor]:
    """`<module>.alpha` for every module of the file, in the sense of core's adapters, which divide it by the rank.

    Args:
        tensors: of the LoRA; of a down projection [rank, in] the rank is read.
        metadata: of its file.

    Returns:
        Scalars; none where the tensors have alphas of their own, or the metadata says none.
    """
    settings = _settings(metadata)
    alpha = settings.get("lora_alpha")
    if not isinstance(alpha, int | float) or any(name.endswith(".alpha") for name in tensors):
        return {}
    found = settings.get("alpha_pattern")
    patterns: Mapping[str, Any] = found if isinstance(found, dict) else {}
    alphas = {}
    for name, tensor in tensors.items():
        if not name.endswith(_DOWN):
            continue
        module, rank = name.removesuffix(_DOWN), tensor.shape[0]
        own = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), alpha)
        scale = float(own) / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        alphas[f"{module}.alpha"] = torch.tensor(scale * rank)
    return alphas


def scales(tensors: Mapping[str, torch.Tensor], alphas: Mapping[str, torch.Tensor]) -> list[float]:
    """What the layers of `metadata_alphas` are multiplied by, each value once, the least first."""
    ranks = {name.removesuffix(_DOWN): tensor.shape[0] for name, tensor in tensors.items() if name.endswith(_DOWN)}
    return sorted({float(alpha) / ranks[name.removesuffix(".alpha")] for name, alpha in alphas.items()})


def _settings(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """The transformer's part of diffusers' `lora_adapter_metadata`, its names without their prefix."""
    try:
        stored = json.loads((metadata or {}).get("lora_adapter_metadata", "{}"))
    except ValueError:
        return {}
    if not isinstance(stored, dict):
        return {}
    settings = {name.rpartition(".")[2]: value for name, value in stored.items()}
    return settings if len(settings) == len(stored) else {}  # of several models: no telling whose
