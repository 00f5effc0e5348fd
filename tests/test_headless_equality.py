"""`lossless` against stock over diffusers' whole transformer: of the official size on a GPU, tiny on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from diffusers import Ideogram4Transformer2DModel
from diffusers.models.transformers.transformer_ideogram4 import (
    IMAGE_POSITION_OFFSET,
    LLM_TOKEN_INDICATOR,
    OUTPUT_IMAGE_INDICATOR,
)
from ideogram4_fusion.benchmarks.random_checkpoint import LAYERS, write_random_checkpoint
from ideogram4_fusion.fusion.fusion import Fusion
from ideogram4_fusion.hosts.diffusers.blocks import HOST
from ideogram4_fusion.hosts.diffusers.load import load_transformer
from ideogram4_fusion.tests.tiny import quantise_row_wise, tiny_config, tiny_state_dict, write_file

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SIDE, TEXT_TOKENS = (64, 256) if ON_GPU else (4, 9)


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ideogram4Transformer2DModel]:
    path: Path = tmp_path_factory.mktemp("checkpoint") / "diffusion_pytorch_model.safetensors"
    if ON_GPU:
        write_random_checkpoint(path, int(os.environ.get("IDEOGRAM4_TEST_LAYERS", LAYERS)), "fp8_row_wise")
    else:
        config = tiny_config()
        write_file(path, quantise_row_wise(tiny_state_dict(config)), config)
    yield load_transformer(path, DEVICE)[0]


def make_inputs(transformer: Ideogram4Transformer2DModel, batch: int, padding: int) -> dict[str, Any]:
    """A packed sequence of text and image tokens; the first `padding` text tokens belong to no segment."""
    generator = torch.Generator().manual_seed(batch)
    image, config = SIDE * SIDE, transformer.config
    total = TEXT_TOKENS + image
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    image_positions = torch.stack((torch.zeros(image, dtype=torch.long), rows.flatten(), columns.flatten()), dim=1)
    text_positions = torch.arange(TEXT_TOKENS)[:, None].expand(TEXT_TOKENS, 3)
    positions = torch.cat((text_positions, image_positions + IMAGE_POSITION_OFFSET))
    segments = torch.ones(batch, total, dtype=torch.long)
    indicator = torch.full((batch, total), OUTPUT_IMAGE_INDICATOR)
    indicator[:, :TEXT_TOKENS] = LLM_TOKEN_INDICATOR
    segments[:, :padding], indicator[:, :padding] = -1, 0
    inputs = {
        "hidden_states": torch.randn(batch, total, config.in_channels, generator=generator).bfloat16(),
        "timestep": torch.full((batch,), 0.3).bfloat16(),
        "encoder_hidden_states": torch.randn(batch, total, config.llm_features_dim, generator=generator).bfloat16(),
        "position_ids": positions.expand(batch, total, 3),
        "segment_ids": segments,
        "indicator": indicator,
    }
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("padding", [0, 3], ids=["no mask", "mask"])
@torch.inference_mode()
def test_lossless_equals_stock(transformer: Ideogram4Transformer2DModel, batch: int, padding: int) -> None:
    inputs = make_inputs(transformer, batch, padding)

    def run() -> torch.Tensor:
        return transformer(**inputs, return_dict=False)[0]

    run()  # the first forward of a process need not repeat itself
    stock = run()
    assert stock.isfinite().all() and torch.equal(run(), stock), "stock does not repeat itself"
    fusion = Fusion("lossless", HOST, DEVICE)
    for _ in range(2):
        with fusion.mounted(transformer):
            assert torch.equal(run().view(torch.int16), stock.view(torch.int16))
    blocks = len(transformer.layers)
    exact = "modulate, gate, gate+modulate, silu-mul, rope exact"
    if not ON_GPU:
        stock_norms = "modulate, gate, gate+modulate stock (ATen adds a row up in another order on the CPU)"
        exact = f"silu-mul, rope exact; {stock_norms}"
    assert fusion.status(transformer) == f"lossless: {blocks}/{blocks} blocks; {exact}"
