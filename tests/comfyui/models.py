"""Ideogram 4 MODELs of ComfyUI for tests: of the official size on a GPU, tiny on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import comfy.cli_args
import comfy.memory_management
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from ideogram4_fusion.benchmarks.random_checkpoint import LAYERS, TEXT, write_random_checkpoint
from ideogram4_fusion.hosts.comfyui.load import load_diffusion_model
from ideogram4_fusion.tests.tiny import tiny_config, tiny_state_dict, write_file

ON_GPU = torch.cuda.is_available()
DYNAMIC = comfy.memory_management.aimdo_enabled
CELLS = 64 if ON_GPU else 4  # of a latent's side: 1024 x 1024 pixels, 64 x 64
TOKENS = 256 if ON_GPU else 20
FEATURES = TEXT if ON_GPU else int(tiny_config()["llm_features_dim"])


def write_checkpoint(folder: Path) -> Path:
    """A random checkpoint: Comfy-Org's fp8_scaled on a GPU (IDEOGRAM4_TEST_LAYERS shortens it), bf16 on the CPU."""
    path = folder / "model.safetensors"
    if ON_GPU:
        return write_random_checkpoint(path, int(os.environ.get("IDEOGRAM4_TEST_LAYERS", LAYERS)))
    config = tiny_config(num_layers=3)
    return write_file(path, {k: v.bfloat16() for k, v in tiny_state_dict(config).items()}, config)


def load(path: Path) -> ModelPatcher:
    """The MODEL, computing in bf16 on the CPU too, where core would choose fp32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.cli_args.args, "bf16_unet", not ON_GPU)
        model = load_diffusion_model(path)
    if not ON_GPU:
        model.model.manual_cast_dtype = None
    return model


def conditioning(masked: bool = False, seed: int = 1) -> list[Any]:
    """Random text features [1, TOKENS, FEATURES]; `masked` pads the last three."""
    features = torch.randn(1, TOKENS, FEATURES, generator=torch.Generator().manual_seed(seed))
    if not masked:
        return [[features, {}]]
    mask = torch.ones(1, TOKENS, dtype=torch.long)
    mask[:, -3:] = 0
    return [[features, {"attention_mask": mask}]]


def empty_latent(batch: int = 1, cells: int = CELLS) -> dict[str, Any]:
    """What EmptyFlux2LatentImage gives."""
    return {"samples": torch.zeros(batch, 128, cells, cells)}
