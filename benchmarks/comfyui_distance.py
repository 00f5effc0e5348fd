"""How far each piece of `high` is from `lossless`, and both from fp32, in a real ComfyUI with a trained checkpoint.

    COMFYUI_PATH=... python -m ideogram4_fusion.benchmarks.comfyui_distance
        [--folder FOLDER] [--captions 64] [--presets INSTANT_8 FAST_20] [--output FILE]

Run it like comfyui_comparison, on a GPU. FOLDER is a checkpoint in the official layout, the demo's by default; its
transformer is measured as it is, kept in row-wise fp8, and written as Comfy-Org's fp8_scaled.

For each variant: PSNR and SSIM of the decoded pictures against `lossless`, one for each caption; the drift, how far its
latent is from that of `lossless` after each step, both on their own way; and the velocity at the noise levels of a
preset, along the way that `lossless` takes, against `lossless` and against the same weights in fp32. Drift and velocity
are relative L2 errors. With random weights of the official size and one block, the velocity alone, at one noise level:
there an error is still the block's own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from ..checkpoint.folder import open_folder
from ..demo_model.captions import random_caption
from ..demo_model.posters import SIDE, random_poster
from ..fusion.pieces import ALL, CUDNN, NONE, STOCK, Pieces
from . import layouts, record
from .comfyui_process import start_comfyui
from .random_checkpoint import random_features, write_random_checkpoint

# cuDNN by name: the demo's heads are none of those that it was measured to be faster for.
VARIANTS = {
    "lossless": NONE,
    "attention": Pieces(CUDNN, False, False, False),
    "fast accumulation": Pieces(STOCK, True, False, False),
    "row-wise fp8": Pieces(STOCK, False, True, False),
    "unproven chains": Pieces(STOCK, False, False, True),
    "high": Pieces(CUDNN, ALL.fast_accumulation, ALL.row_wise_fp8, ALL.unproven_chains),
}
# What the model is asked at, and its noise level, in every step; then where the last one ends, at 0.
Way = list[tuple[torch.Tensor, float]]

BATCH = 8
CAPTIONS_SEED = 30_000
FOLLOWED = 2  # batches whose velocities are taken
BLOCK_SIGMA, BLOCK_CELLS = 0.7, 64  # noise level and side of the latent of the one-block model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=record.RESULTS.parent.parent / "demo_model" / "checkpoint")
    parser.add_argument("--captions", type=int, default=64)
    parser.add_argument("--presets", nargs="+", default=["INSTANT_8", "FAST_20"])
    parser.add_argument("--output", type=Path, default=record.RESULTS / "comfyui_distance.json")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    start_comfyui(Path(os.environ.get("COMFYUI_PATH", "")), on_gpu=on_gpu, dynamic=on_gpu)
    with tempfile.TemporaryDirectory() as scratch:
        record.write(options.output, run(options, Path(scratch)))


@torch.inference_mode()
def run(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Rows of pictures and velocities by layout and preset, and of one block of the official size."""
    import comfy.model_management

    from ..hosts.comfyui.folder import load_folder

    loaded = load_folder(options.folder, "fp8")
    batches = list(_batches(loaded.clip, options.captions))
    transformer = open_folder(options.folder).transformer
    trained = scratch / "trained"
    trained.mkdir()
    shutil.copy(transformer.with_name("config.json"), trained)  # what a small model's tensors do not tell
    weights = layouts.dequantised(transformer)
    scaled = layouts.as_scaled(weights)
    models = {
        "row-wise fp8": (loaded.model, weights),
        "fp8_scaled": (_load(layouts.write(trained / "scaled.safetensors", scaled)), scaled),
    }
    rows: list[dict[str, Any]] = []
    for layout, (model, numbers) in models.items():
        exact = _load(layouts.write(trained / "plain.safetensors", layouts.as_plain(numbers)), fp32=True)
        for preset in options.presets:
            for row in _pictures(model, exact, loaded.vae, batches, preset):
                rows.append({"layout": layout, "preset": preset, **row})
                print(_line(rows[-1]), flush=True)
    blocks = list(_one_block(scratch))
    print(*blocks, sep="\n", flush=True)
    return {"origin": record.origin(comfy.model_management.get_torch_device()), "rows": rows, "blocks": blocks}


def _load(file: Path, fp32: bool = False) -> Any:
    import comfy.cli_args

    from ..hosts.comfyui.load import load_diffusion_model

    before = comfy.cli_args.args.fp32_unet
    comfy.cli_args.args.fp32_unet = fp32
    try:
        return load_diffusion_model(file, "fp8")
    finally:
        comfy.cli_args.args.fp32_unet = before


def _variants(model: Any) -> dict[str, Any]:
    from ..hosts.comfyui.quality import set_quality

    return {name: set_quality(model, "high", pieces=pieces)[0] for name, pieces in VARIANTS.items()}


def _batches(clip: Any, captions: int) -> Iterator[torch.Tensor]:
    """Text features [BATCH, T, width] of captions that have as many tokens: then no mask keeps cuDNN away."""
    random, left = Random(CAPTIONS_SEED), captions
    waiting: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    while left > 0:
        caption = random_caption(random_poster(random), random)
        ((features, _),) = clip.encode_from_tokens_scheduled(clip.tokenize(caption))
        group = waiting[features.shape[1]]
        group.append(features)
        if len(group) == min(BATCH, left):
            yield torch.cat(group)
            left -= len(group)
            group.clear()


def _pictures(
    model: Any, exact: Any, vae: Any, batches: Sequence[torch.Tensor], preset: str
) -> Iterator[dict[str, Any]]:
    from ..comparison.metrics import compare
    from ..hosts.comfyui.quality import status

    variants = _variants(model)
    ways: dict[str, list[Way]] = defaultdict(list)
    pictures: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, variant in variants.items():
        for number, features in enumerate(batches):
            latent, way = _render(variant, features, preset, number)
            pictures[name] += list(vae.decode(latent).float().cpu().split(1))
            ways[name].append(way)
    followed = list(zip(ways["lossless"][:FOLLOWED], batches, strict=False))
    reference = [[_velocity(variants["lossless"], *at, features) for at in way[:-1]] for way, features in followed]
    true = [[_velocity(exact, *at, features) for at in way[:-1]] for way, features in followed]
    for name, variant in variants.items():
        ours = [[_velocity(variant, *at, features) for at in way[:-1]] for way, features in followed]
        compared = [compare(a, b) for a, b in zip(pictures[name], pictures["lossless"], strict=True)]
        yield {
            "variant": name,
            "status": status(variant),
            "psnr_db": _spread([m.psnr_db for m in compared]),
            "ssim": _spread([m.ssim for m in compared]),
            "identical": sum(m.differing == 0 for m in compared),
            "captions": len(compared),
            "drift_from_lossless": _errors(_latents(ways[name]), _latents(ways["lossless"])),
            "velocity_error_to_lossless": _errors(ours, reference),
            "velocity_error_to_fp32": _errors(ours, true),
        }


def _latents(ways: Sequence[Way]) -> list[list[torch.Tensor]]:
    """Of each batch, what every step made of it."""
    return [[x for x, _ in way[1:]] for way in ways]


def _render(model: Any, features: torch.Tensor, preset_name: str, seed: int) -> tuple[torch.Tensor, Way]:
    """The latent of a batch as a VAE takes it, and its way."""
    import comfy.sample

    from ..hosts.comfyui.sampling import euler, find_preset, make_guider, preset_sigmas

    preset = find_preset(preset_name)
    start = torch.zeros(len(features), 128, SIDE // 16, SIDE // 16)
    levels = preset_sigmas(model, {"samples": start}, preset)
    guider = make_guider(model, [[features, {}]], preset, levels)

    way: Way = []

    def callback(step: int, denoised: torch.Tensor, x: torch.Tensor, total: int) -> None:
        way.append((x.float().cpu(), float(levels[step])))
        if step == total - 1:
            way.append((denoised.float().cpu(), 0.0))  # where Euler's last step ends

    latent: torch.Tensor = guider.sample(
        comfy.sample.prepare_noise(start, seed), start, euler(), levels, callback=callback, disable_pbar=True, seed=seed
    )
    return latent, way


def _velocity(model: Any, x: torch.Tensor, sigma: float, features: torch.Tensor) -> torch.Tensor:
    """What one Euler step from `sigma` to 0 moves `x` by, over `sigma`; float32 on the CPU."""
    from ..hosts.comfyui.sampling import euler, find_preset, make_guider

    levels = torch.tensor([sigma, 0.0])
    guider = make_guider(model, [[features, {}]], find_preset("INSTANT_8"), levels)
    # core scales the noise by sigma and adds nothing of an empty latent: it starts at x.
    x = x.float().cpu()
    end = guider.sample(x / sigma, torch.zeros_like(x), euler(), levels, disable_pbar=True, seed=0)
    return (x - end.float().cpu()) / sigma


def _errors(ours: Sequence[Sequence[torch.Tensor]], theirs: Sequence[Sequence[torch.Tensor]]) -> list[float]:
    """Relative L2 error at each step, the median over the images followed."""
    batches = [[_relative(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(ours, theirs, strict=True)]
    return [statistics.median(error for images in step for error in images) for step in zip(*batches, strict=True)]


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> list[float]:
    difference = (ours.double() - theirs.double()).flatten(1).norm(dim=1)
    return [float(e) for e in difference / theirs.double().flatten(1).norm(dim=1)]


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Median, least and all of them; a PSNR without a difference, which is infinite, as null."""
    known = [float("inf") if value is None else value for value in values]
    finite = [value if value != float("inf") else None for value in known]
    median = statistics.median(known)
    return {
        "median": None if median == float("inf") else median,
        "min": None if min(known) == float("inf") else min(known),
        "values": finite,
    }


def _one_block(scratch: Path) -> Iterator[Mapping[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 128, BLOCK_CELLS, BLOCK_CELLS, generator=generator)
    features = random_features()
    for layout in ("fp8_row_wise", "fp8_scaled"):
        file = write_random_checkpoint(scratch / "block.safetensors", layers=1, weights=layout)
        stored = layouts.load_file(str(file))
        numbers = layouts.dequantise_row_wise(stored) if layout == "fp8_row_wise" else stored
        exact = _load(layouts.write(scratch / "plain.safetensors", layouts.as_plain(numbers)), fp32=True)
        true = _velocity(exact, x, BLOCK_SIGMA, features)
        variants = _variants(_load(file))
        _velocity(variants["lossless"], x, BLOCK_SIGMA, features)
        reference = _velocity(variants["lossless"], x, BLOCK_SIGMA, features)
        for name, variant in variants.items():
            ours = _velocity(variant, x, BLOCK_SIGMA, features)
            yield {
                "layout": layout,
                "variant": name,
                "velocity_error_to_lossless": _relative(ours, reference)[0],
                "velocity_error_to_fp32": _relative(ours, true)[0],
            }


def _line(row: Mapping[str, Any]) -> str:
    psnr, ssim = row["psnr_db"], row["ssim"]
    errors = ", ".join(
        f"{name.removeprefix('velocity_error_')} {max(row[name]):.2e}"
        for name in ("velocity_error_to_lossless", "velocity_error_to_fp32")
    )
    head = f"{row['layout']:13s} {row['preset']:10s} {row['variant']:18s}"
    return f"{head} PSNR {psnr['median']} (least {psnr['min']}), SSIM {ssim['median']}, velocity {errors}"


if __name__ == "__main__":
    main()
