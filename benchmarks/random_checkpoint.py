"""Writes an Ideogram 4 transformer of the official size with random weights, to measure with where there are none.

    python -m ideogram4_fusion.benchmarks.random_checkpoint FILE [--layers 34] [--weights fp8_scaled|fp8_row_wise|bf16]

Speed and equality do not depend on what the weights are; the pictures are noise. Random weights keep the scale of their
input, so that activations stay in bf16's comfortable range.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, HEAD, INNER, ADALN, CHANNELS, TEXT = 4608, 256, 12288, 512, 128, 53248
LAYERS = 34
WEIGHTS = ("fp8_scaled", "fp8_row_wise", "bf16")
FP8_MAX = 448.0  # torch.finfo(torch.float8_e4m3fn).max


def _linears(layers: int) -> Iterator[tuple[str, int, int, bool]]:
    """(name, out, in, bias) of every Linear."""
    yield "input_proj", HIDDEN, CHANNELS, True
    yield "llm_cond_proj", HIDDEN, TEXT, True
    yield "t_embedding.mlp_in", HIDDEN, HIDDEN, True
    yield "t_embedding.mlp_out", HIDDEN, HIDDEN, True
    yield "adaln_proj", ADALN, HIDDEN, True
    for layer in range(layers):
        block = f"layers.{layer}"
        yield f"{block}.attention.qkv", 3 * HIDDEN, HIDDEN, False
        yield f"{block}.attention.o", HIDDEN, HIDDEN, False
        yield f"{block}.feed_forward.w1", INNER, HIDDEN, False
        yield f"{block}.feed_forward.w2", HIDDEN, INNER, False
        yield f"{block}.feed_forward.w3", INNER, HIDDEN, False
        yield f"{block}.adaln_modulation", 4 * HIDDEN, ADALN, True
    yield "final_layer.linear", CHANNELS, HIDDEN, True
    yield "final_layer.adaln_modulation", HIDDEN, ADALN, True


def _norms(layers: int) -> Iterator[tuple[str, int]]:
    """(name, size) of every RMSNorm."""
    yield "llm_cond_norm", TEXT
    for layer in range(layers):
        for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
            yield f"layers.{layer}.{name}", HIDDEN
        for name in ("norm_q", "norm_k"):
            yield f"layers.{layer}.attention.{name}", HEAD


def random_tensors(layers: int, weights: str, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """All tensors on the CPU, made on `device`. Layouts as in Comfy-Org's, the official and fal's files."""
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    for name, out, size, bias in _linears(layers):
        weight = random(out, size) * size**-0.5
        if weights == "bf16":
            tensors[f"{name}.weight"] = weight.bfloat16().cpu()
        else:
            scale = weight.abs().amax() if weights == "fp8_scaled" else weight.abs().amax(dim=1)
            scale = scale / FP8_MAX
            tensors[f"{name}.weight"] = (weight / (scale if scale.ndim == 0 else scale[:, None])).to(
                torch.float8_e4m3fn
            ).cpu()  # fmt: skip
            tensors[f"{name}.weight_scale"] = scale.float().cpu()
            if weights == "fp8_scaled":
                marker = json.dumps({"format": "float8_e4m3fn"}).encode()
                tensors[f"{name}.comfy_quant"] = torch.tensor(list(marker), dtype=torch.uint8)
        if bias:
            tensors[f"{name}.bias"] = (random(out) * 0.02).bfloat16().cpu()
    for name, size in _norms(layers):
        tensors[f"{name}.weight"] = (1 + 0.1 * random(size)).bfloat16().cpu()
    tensors["embed_image_indicator.weight"] = (random(2, HIDDEN) * 0.02).bfloat16().cpu()
    return tensors


def write_random_checkpoint(
    path: Path, layers: int = LAYERS, weights: str = "fp8_scaled", device: torch.device | None = None
) -> Path:
    """Writes the file: 9.3 GB in fp8, 18.6 GB in bf16 at 34 layers. Returns its path."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    save_file(random_tensors(layers, weights, device), str(path))
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
