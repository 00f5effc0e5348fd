"""Times whole generations with real weights and compares the pictures of each quality with stock's.

    python -m ideogram4_fusion.benchmarks.headless_generations FOLDER
        [--presets INSTANT_8 FAST_20] [--qualities off lossless high] [--size 1024] [--generations 10] [--output FILE]

FOLDER is a checkpoint in the official layout. A fox photograph and a typographic poster are each rendered ten times in
one warmed process; the first time is thrown away and the median of the others kept, denoising and decoding without the
encoding of the prompt. PSNR and SSIM are against `off`, and null where the pictures are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported: a trial on the CPU

from ..checkpoint.errors import CheckpointError
from ..checkpoint.folder import open_folder
from ..comparison.images import eight_bit
from ..comparison.metrics import compare
from ..fusion.fusion import OFF, QUALITIES
from ..hosts.diffusers.conditioning import encode
from ..hosts.diffusers.load import load_models
from ..hosts.diffusers.render import Renderer
from ..hosts.diffusers.settings import Settings, SettingsError
from ..sampling.presets import PRESETS
from . import record
from .prompts import PROMPTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--presets", nargs="+", default=["INSTANT_8", "FAST_20"], choices=PRESETS)
    parser.add_argument("--qualities", nargs="+", default=list(QUALITIES), choices=QUALITIES)
    parser.add_argument("--size", type=int, default=1024, help="pixels a side")
    parser.add_argument("--generations", type=int, default=10, help="of each; at least 2, the first is thrown away")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="results/headless.json; without a GPU output/headless.json")
    options = parser.parse_args()
    if options.generations < 2 or options.qualities[0] != OFF:
        parser.error("at least 2 generations are needed, and `off` first among the qualities")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    if not on_gpu:
        print("no GPU: the kernels are interpreted, so these times say nothing", file=sys.stderr)
    rows = []
    try:
        for row in run(options, device):
            rows.append(row)
            print(row, flush=True)
    except (CheckpointError, SettingsError) as error:
        sys.exit(f"bench: {error}")
    output = options.output or (record.RESULTS if on_gpu else Path("output")) / "headless.json"
    record.write(output, {"origin": record.origin(device), "rows": rows})


def run(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One row a prompt, preset and quality."""
    needs_unconditional = any(PRESETS[name].needs_unconditional for name in options.presets)
    folder = open_folder(options.folder, needs_unconditional)
    settings = {
        (prompt, preset): Settings(PROMPTS[prompt], PRESETS[preset], options.size, options.size, options.seed)
        for prompt in PROMPTS
        for preset in options.presets
    }
    encoded = {key: encode(folder, each, device) for key, each in settings.items()}  # before the transformer needs room
    models = load_models(folder, device)
    for (prompt, preset), each in settings.items():
        stock: torch.Tensor | None = None
        for quality in options.qualities:
            renderer = Renderer(models, encoded[prompt, preset], each, quality)
            renderer.warm_up()
            renders = [renderer.render() for _ in range(options.generations)]
            image = renders[-1].image
            stock = image if stock is None else stock
            metrics = compare(stock, image)
            same = metrics.differing == 0
            spread = record.spread([rendering.render.total_seconds for rendering in renders[1:]])
            yield {
                "host": "diffusers",
                "checkpoint": models.checkpoint.describe(),
                "prompt": prompt,
                "preset": preset,
                "size": options.size,
                "quality": quality,
                "seconds": spread["median"],
                "seconds_spread": spread,
                "equal_to_stock": same,
                "psnr_db": None if same else metrics.psnr_db,
                "ssim": None if same else metrics.ssim,
                "md5": hashlib.md5(eight_bit(image).numpy().tobytes(), usedforsecurity=False).hexdigest(),
                "status": renderer.status,
            }


if __name__ == "__main__":
    main()
