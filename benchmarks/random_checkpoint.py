"""Writes an Ideogram 4 transformer of the official size with random weights, to measure with where there are none.

    python -m ideogram4_fusion.benchmarks.random_checkpoint FILE [--layers 34] [--weights fp8_scaled|fp8_row_wise|bf16]

Speed and equality do not depend on what the weights are; the pictures are noise. Random weights keep the scale of their
input, so that activations stay in bf16's comfortable range.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..checkpoint.completeness import linear_shapes, other_shapes
from ..checkpoint.convert import E4M3_MAX
from ..checkpoint.dimensions import Dimensions
from ..checkpoint.quantisation import fp8_mark
from .record import RANDOM

# ideogram-ai/ideogram-4.
OFFICIAL = Dimensions(
    in_channels=128,
    num_layers=34,
    num_attention_heads=18,
    attention_head_dim=256,
    intermediate_size=12288,
    adaln_dim=512,
    llm_features_dim=53248,
    rope_theta=5_000_000,
    mrope_section=(24, 20, 20),
    norm_eps=1e-5,
)
LAYERS, TEXT = OFFICIAL.num_layers, OFFICIAL.llm_features_dim
TEXT_TOKENS = 256  # of the prompts measured with
WEIGHTS = ("fp8_scaled", "fp8_row_wise", "bf16")


def random_tensors(layers: int, weights: str, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """All tensors on the CPU, made on `device`. Layouts as in Comfy-Org's, the official and fal's files."""
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    dims = replace(OFFICIAL, num_layers=layers)
    for name, shape in linear_shapes(dims, "fused").items():
        weight = random(*shape) * shape[1] ** -0.5
        if weights == "bf16":
            tensors[f"{name}.weight"] = weight.bfloat16().cpu()
        else:
            scale = weight.abs().amax() if weights == "fp8_scaled" else weight.abs().amax(dim=1)
            scale = scale / E4M3_MAX
            tensors[f"{name}.weight"] = (weight / (scale if scale.ndim == 0 else scale[:, None])).to(
                torch.float8_e4m3fn
            ).cpu()  # fmt: skip
            tensors[f"{name}.weight_scale"] = scale.float().cpu()
            if weights == "fp8_scaled":
                tensors[f"{name}.comfy_quant"] = fp8_mark()
    for name, others in other_shapes(dims, "fused").items():
        values = 1 + 0.1 * random(*others) if "norm" in name else 0.02 * random(*others)
        tensors[name] = values.bfloat16().cpu()
    return tensors


def random_features(width: int = TEXT, seed: int = 0) -> torch.Tensor:
    """Random text features [1, TEXT_TOKENS, width] on the CPU, where core's text encoders leave theirs."""
    return torch.randn(1, TEXT_TOKENS, width, generator=torch.Generator().manual_seed(seed))


def write_random_checkpoint(
    path: Path, layers: int = LAYERS, weights: str = "fp8_scaled", device: torch.device | None = None
) -> Path:
    """Writes the file: 9.3 GB in fp8, 18.6 GB in bf16 at 34 layers. Returns its path."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    save_file(random_tensors(layers, weights, device), str(path), {RANDOM: "yes"})
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--weights", choices=WEIGHTS, default=WEIGHTS[0])
    options = parser.parse_args()
    print(write_random_checkpoint(options.file, options.layers, options.weights))


if __name__ == "__main__":
    main()
