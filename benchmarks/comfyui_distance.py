"""How far each piece of `high` is from `lossless`, and both from fp32, in a real ComfyUI with a trained checkpoint.

    COMFYUI_PATH=... python -m ideogram4_fusion.benchmarks.comfyui_distance
        [--folder FOLDER] [--captions 64] [--layouts "row-wise fp8" fp8_scaled] [--presets INSTANT_8 FAST_20]
        [--no-block] [--output FILE]

Run it like comfyui_comparison, on a GPU. FOLDER is a checkpoint in the official layout, the demo's by default; its
transformer is measured as it is, kept in row-wise fp8, and written as Comfy-Org's fp8_scaled.

For each variant, against `lossless` and against the same weights in fp32: PSNR and SSIM of the decoded pictures, one
for each caption; the drift, how far its latent is after each step, both on their own way; and the velocity at the noise
levels of a preset, along the way that `lossless` takes. Drift and velocity are relative L2 errors. Stock, and `high`
without any piece, are variants too, so that their equality is measured. With random weights of the official size and
one block, the velocity alone, at one noise level: there an error is still the block's own.

The first CAPTIONS captions of one random sequence are rendered, those of as many tokens in one batch: no mask arises,
which would keep cuDNN's attention away. Caption number i, from 0, has the noise of seed i. Velocities are taken of the
first 8 (FOLLOWED), each twice in a batch: alone it has so few values that stock takes cuDNN's attention too. Results
are written after each row.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from ..checkpoint.folder import open_folder
from ..demo_model.captions import random_caption
from ..demo_model.posters import SIDE, random_poster
from ..fusion.fusion import HIGH, LOSSLESS, OFF
from ..fusion.pieces import ALL, CUDNN, NONE
from ..hosts.diffusers.demo import DEMO_CHECKPOINT
from . import layouts, record
from .comfyui_process import start_comfyui
from .distances import compared, errors, relative
from .pieces import ALONE
from .random_checkpoint import random_features, write_random_checkpoint

ROW_WISE, SCALED = LAYOUTS = ("row-wise fp8", "fp8_scaled")
REFERENCE, FP32 = LOSSLESS, "fp32"
# cuDNN by name, since `auto` would not take it for the demo's heads of 64.
CHOSEN = {"nothing": NONE, **ALONE, "attention": replace(NONE, attention=CUDNN)}
VARIANTS = {
    REFERENCE: (LOSSLESS, ALL),
    "high": (HIGH, replace(ALL, attention=CUDNN)),
    "stock": (OFF, ALL),
    **{name: (HIGH, pieces) for name, pieces in CHOSEN.items()},
}
# What the model is asked at, and its noise level, in every step; then where the last one ends, at 0.
Way = list[tuple[torch.Tensor, float]]

CAPTIONS_SEED = 30_000
FOLLOWED, TWICE = 8, 2  # captions whose velocities are taken, and how often each is in its batch
BLOCK_SIGMA, BLOCK_CELLS = 0.7, 64  # noise level and side of the latent of the one-block model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEMO_CHECKPOINT)
    parser.add_argument("--captions", type=int, default=64)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--presets", nargs="+", default=["INSTANT_8", "FAST_20"])
    parser.add_argument("--no-block", action="store_true", help="leave out the one of the official size")
    parser.add_argument("--output", type=Path, default=record.RESULTS / "comfyui_distance.json")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    start_comfyui(Path(os.environ.get("COMFYUI_PATH", "")), on_gpu=on_gpu, dynamic=on_gpu)
    with tempfile.TemporaryDirectory() as scratch:
        run(options, Path(scratch))


@torch.inference_mode()
def run(options: argparse.Namespace, scratch: Path) -> None:
    """Writes rows of pictures and velocities by layout and preset, and of one block of the official size."""
    import comfy.model_management

    from ..hosts.comfyui.folder import load_folder

    loaded = load_folder(options.folder, "fp8")
    captions = list(_captions(loaded.clip, options.captions))
    transformer = open_folder(options.folder).transformer
    trained = scratch / "trained"
    trained.mkdir()
    shutil.copy(transformer.with_name("config.json"), trained)  # what a small model's tensors do not tell
    weights = layouts.dequantised(transformer)
    scaled = layouts.as_scaled(weights)
    models = {
        ROW_WISE: (loaded.model, weights),
        SCALED: (_load(layouts.write(trained / "scaled.safetensors", scaled)), scaled),
    }
    rows: list[Mapping[str, Any]] = []
    blocks: list[Mapping[str, Any]] = []
    result = {"origin": record.origin(comfy.model_management.get_torch_device()), "rows": rows, "blocks": blocks}
    for layout in options.layouts:
        model, numbers = models[layout]
        exact = _load(layouts.write(trained / "plain.safetensors", layouts.as_plain(numbers)), fp32=True)
        for preset in options.presets:
            for row in _pictures(model, exact, loaded.vae, captions, preset):
                rows.append({"layout": layout, "preset": preset, **row})
                print(_line(rows[-1]), flush=True)
                record.write(options.output, result)
    if not options.no_block:
        blocks += _one_block(scratch)
        print(*blocks, sep="\n", flush=True)
        record.write(options.output, result)


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

    return {name: set_quality(model, quality, pieces=pieces)[0] for name, (quality, pieces) in VARIANTS.items()}


def _captions(clip: Any, number: int) -> Iterator[torch.Tensor]:
    """Text features [1, T, width] of each caption."""
    random = Random(CAPTIONS_SEED)
    for _ in range(number):
        caption = random_caption(random_poster(random), random)
        ((features, _),) = clip.encode_from_tokens_scheduled(clip.tokenize(caption))
        yield features


def _pictures(
    model: Any, exact: Any, vae: Any, captions: Sequence[torch.Tensor], preset: str
) -> Iterator[dict[str, Any]]:
    from ..hosts.comfyui.quality import status

    variants = _variants(model)
    # Thrown away: what a process renders first need not be repeated to the bit, as comfyui_steps knows of an H200.
    _render(variants[REFERENCE], captions[:1], preset, [0])
    references = {FP32: _followed(exact, captions, preset, vae)}
    references[REFERENCE] = _followed(variants[REFERENCE], captions, preset, vae)
    ways = references[REFERENCE].ways[:FOLLOWED]

    def velocities(side: Any) -> list[list[torch.Tensor]]:
        return [_velocities(side, way[:-1], features) for way, features in zip(ways, captions, strict=False)]

    expected = {REFERENCE: velocities(variants[REFERENCE]), FP32: velocities(exact)}
    met: list[tuple[_Rendered, dict[str, Any]]] = []
    for name, variant in variants.items():
        ours = references.get(name) or _followed(variant, captions, preset, vae)
        found = expected.get(name) or velocities(variant)
        # SSIM on the CPU takes longer than the pictures do, and most variants paint the same ones.
        distances = next((known for theirs, known in met if ours.shows_the_same_as(theirs)), None)
        if distances is None:
            distances = {}
            for other, theirs in references.items():
                distances |= compared(name, ours.pictures, other, theirs.pictures)
            met.append((ours, distances))
        row = {"variant": name, "status": status(variant), "captions": len(captions), **distances}
        for other, theirs in references.items():
            row[f"drift_from_{other}"] = errors(_latents(ours.ways), _latents(theirs.ways))
            row[f"velocity_error_to_{other}"] = errors(found, expected[other])
        yield row


@dataclass(frozen=True)
class _Rendered:
    """Of each caption, its picture [1, H, W, 3] and its way."""

    pictures: list[torch.Tensor]
    ways: list[Way]

    def shows_the_same_as(self, other: _Rendered) -> bool:
        return all(torch.equal(*pair) for pair in zip(self.pictures, other.pictures, strict=True))


def _followed(model: Any, captions: Sequence[torch.Tensor], preset: str, vae: Any) -> _Rendered:
    lengths: defaultdict[int, list[int]] = defaultdict(list)
    for number, features in enumerate(captions):
        lengths[features.shape[1]].append(number)
    pictures: dict[int, torch.Tensor] = {}
    ways: dict[int, Way] = {}
    for numbers in lengths.values():
        latents, way = _render(model, [captions[number] for number in numbers], preset, numbers)
        for place, number in enumerate(numbers):
            pictures[number] = vae.decode(latents[place : place + 1]).float().cpu()
            ways[number] = [(x[place : place + 1], level) for x, level in way]
    order = range(len(captions))
    return _Rendered([pictures[number] for number in order], [ways[number] for number in order])


def _latents(ways: Sequence[Way]) -> list[list[torch.Tensor]]:
    """Of each caption, what every step made of its noise."""
    return [[x for x, _ in way[1:]] for way in ways]


def _render(
    model: Any, captions: Sequence[torch.Tensor], preset_name: str, seeds: Sequence[int]
) -> tuple[torch.Tensor, Way]:
    """The latents of captions of as many tokens, as a VAE takes them, and their way."""
    import comfy.sample

    from ..hosts.comfyui.sampling import euler, find_preset, make_guider, preset_sigmas

    preset = find_preset(preset_name)
    start = torch.zeros(1, 128, SIDE // 16, SIDE // 16)
    noise = torch.cat([comfy.sample.prepare_noise(start, seed) for seed in seeds])
    start = start.expand_as(noise)
    levels = preset_sigmas(model, {"samples": start}, preset)
    guider = make_guider(model, [[torch.cat(list(captions)), {}]], preset, levels)
    way: Way = []

    def callback(step: int, denoised: torch.Tensor, x: torch.Tensor, total: int) -> None:
        way.append((x.float().cpu(), float(levels[step])))
        if step == total - 1:
            way.append((denoised.float().cpu(), 0.0))  # where Euler's last step ends

    latents: torch.Tensor = guider.sample(
        noise, start, euler(), levels, callback=callback, disable_pbar=True, seed=seeds[0]
    )
    return latents, way


def _velocities(model: Any, way: Way, features: torch.Tensor) -> list[torch.Tensor]:
    """What Euler's steps would follow at each place of `way`, whose levels are above 0; float32 on the CPU.

    One sampling asks for all of them: to begin one costs more than a step of a small model does.
    """
    from comfy.samplers import KSAMPLER

    from ..hosts.comfyui.sampling import find_preset, make_guider

    found: list[torch.Tensor] = []

    def follow(denoise: Callable[..., torch.Tensor], x: torch.Tensor, *_: Any, extra_args: Any, **__: Any) -> Any:
        for at, sigma in way:
            here = at.to(x).expand_as(x)
            denoised = denoise(here, x.new_full((len(x),), sigma), **extra_args)
            found.append(((here - denoised) / sigma)[:1].float().cpu())
        return x

    levels = torch.tensor([*(sigma for _, sigma in way), 0.0])
    guider = make_guider(model, [[features.repeat(TWICE, 1, 1), {}]], find_preset("INSTANT_8"), levels)
    nothing = torch.zeros_like(way[0][0]).repeat(TWICE, 1, 1, 1)
    guider.sample(nothing, nothing, KSAMPLER(follow), levels, disable_pbar=True, seed=0)
    return found


def _one_block(scratch: Path) -> Iterator[Mapping[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    way = [(torch.randn(1, 128, BLOCK_CELLS, BLOCK_CELLS, generator=generator), BLOCK_SIGMA)]
    features = random_features()
    for layout in ("fp8_row_wise", "fp8_scaled"):
        file = write_random_checkpoint(scratch / "block.safetensors", layers=1, weights=layout)
        stored = layouts.load_file(str(file))
        numbers = layouts.dequantise_row_wise(stored) if layout == "fp8_row_wise" else stored
        exact = _load(layouts.write(scratch / "plain.safetensors", layouts.as_plain(numbers)), fp32=True)
        (true,) = _velocities(exact, way, features)
        variants = _variants(_load(file))
        _velocities(variants[REFERENCE], way, features)  # as in _pictures
        found = {name: _velocities(variant, way, features)[0] for name, variant in variants.items()}
        for name, ours in found.items():
            yield {
                "layout": layout,
                "variant": name,
                f"velocity_error_to_{REFERENCE}": relative(ours, found[REFERENCE]),
                f"velocity_error_to_{FP32}": relative(ours, true),
            }


def _line(row: Mapping[str, Any]) -> str:
    parts = [f"{row['layout']:13s} {row['preset']:10s} {row['variant']:18s}"]
    for other in (REFERENCE, FP32):
        psnr, ssim, steps = (row[f"{name}_to_{other}"] for name in ("psnr_db", "ssim", "velocity_error"))
        velocity = f"velocity {statistics.median(steps):.2e} (most {max(steps):.2e})"
        parts.append(f"to {other}: PSNR {psnr['median']} (least {psnr['min']}), SSIM {ssim['median']}, {velocity}")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
