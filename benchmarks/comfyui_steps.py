"""Times steps and whole generations of the model in a real ComfyUI, stock and fused, and says whether they are equal.

    COMFYUI_PATH=... python -m ideogram4_fusion.benchmarks.comfyui_steps
        [--checkpoint FILE | --weights fp8_scaled|fp8_row_wise|bf16] [--sizes 256 512 1024 2048]
        [--generations INSTANT_8 FAST_20] [--size 1024] [--qualities lossless high]
        [--pieces attention ...] [--piece-sizes 1024 2048] [--patcher dynamic|plain] [--rounds 3]
        [--row-wise-weights fp8|bf16] [--output FILE]

Run it like comfyui_comparison. Both sides go through core's Euler sampler, so that a step holds everything that a user
waits for. Where outputs differ, `lossless` gets no ratio. Pieces of `high` are timed each by itself. Row-wise weights
are kept in fp8, or become bf16 as they are loaded.

Steps: stock and fused take turns, the first turn of each is thrown away, and the ratio is that of the medians of one
run. The device is waited for behind each step. Peak memory is what PyTorch had allocated, weights outside of the
dynamic patcher included: the most of the turns that are timed, and that of the first by itself, in which `lossless`
proves its chains.

Generations: each preset ten times in one warmed process, the first is thrown away, the median of nine; nothing waits
between two steps, as where nobody looks.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import record
from .comfyui_process import start_comfyui
from .pieces import ALONE
from .random_checkpoint import WEIGHTS, random_features, write_random_checkpoint

FP8, BF16 = "fp8", "bf16"  # as the loader takes them
STEP_PRESET = "FAST_20"
LARGE, STEPS_OF_LARGE = 1536, 6  # pixels from which on fewer steps do: a step is then most of a second
GENERATIONS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", type=Path, help="a transformer file; random weights of the official size without"
    )
    parser.add_argument("--weights", choices=WEIGHTS, default=WEIGHTS[0], help="layout of the random weights")
    parser.add_argument("--sizes", type=int, nargs="*", default=[256, 512, 1024, 2048])
    parser.add_argument("--generations", nargs="*", default=["INSTANT_8", "FAST_20"], metavar="PRESET")
    parser.add_argument("--size", type=int, default=1024, help="of the generations, pixels a side")
    parser.add_argument("--qualities", nargs="+", default=["lossless", "high"])
    parser.add_argument("--pieces", nargs="*", choices=list(ALONE), default=[], metavar="PIECE")
    parser.add_argument("--piece-sizes", type=int, nargs="*", default=[1024, 2048])
    parser.add_argument("--patcher", choices=["dynamic", "plain"], default="dynamic")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--row-wise-weights", choices=(FP8, BF16), default=FP8, help="default: %(default)s")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dynamic = on_gpu and options.patcher == "dynamic"
    start_comfyui(Path(os.environ.get("COMFYUI_PATH", "")), on_gpu=on_gpu, dynamic=dynamic)
    with tempfile.TemporaryDirectory() as scratch:
        file = options.checkpoint or write_random_checkpoint(
            Path(scratch, "random.safetensors"), weights=options.weights
        )
        run(file, options, options.output or record.RESULTS / f"comfyui_{options.patcher}.json")


@torch.inference_mode()
def run(file: Path, options: argparse.Namespace, output: Path) -> None:
    """Writes step rows by size and generation rows by preset, what there is of them after each size and preset."""
    import comfy.model_management

    from ..hosts.comfyui.load import describe_file, load_diffusion_model
    from ..hosts.comfyui.quality import set_quality, status

    model = load_diffusion_model(file, options.row_wise_weights)
    sides = {"off": model} | {quality: set_quality(model, quality)[0] for quality in options.qualities}
    alone = {f"high: {name}": set_quality(model, "high", pieces=ALONE[name])[0] for name in options.pieces}
    checkpoint = record.checkpoint(file, describe_file(file, options.row_wise_weights))
    origin = record.origin(comfy.model_management.get_torch_device())
    steps: list[dict[str, Any]] = []
    generations: list[dict[str, Any]] = []
    results = {
        "origin": origin,
        "patcher": options.patcher,
        "rounds": options.rounds,
        "steps": steps,
        "generations": generations,
    }
    for size in options.sizes:
        timed = {**sides, **alone} if size in options.piece_sizes else sides
        for row in _step_rows(timed, size, options.rounds):
            row = {"host": "ComfyUI", "checkpoint": checkpoint, **row, "status": status(timed[row["quality"]])}
            steps.append(row)
            print({k: v for k, v in row.items() if not k.endswith("spread")}, flush=True)
        record.write(output, results)
    for preset in options.generations:
        rows = _generation_rows(sides, preset, options.size)
        generations += [{"host": "ComfyUI", "checkpoint": checkpoint, **row} for row in rows]
        print(*rows, sep="\n", flush=True)
        record.write(output, results)


def _step_rows(sides: Mapping[str, Any], size: int, rounds: int) -> list[dict[str, Any]]:
    """One row a side but for `off`."""
    from ..hosts.comfyui.sampling import StepClock

    times: dict[str, list[float]] = {name: [] for name in sides}
    outputs: dict[str, torch.Tensor] = {}
    repeats = dict.fromkeys(sides, True)
    first_peaks: dict[str, float] = {}
    peaks: dict[str, float] = {}
    features = _features(sides["off"])
    for turn in range(rounds + 1):
        for name, side in sides.items():
            _forget_peak()
            clock = StepClock()
            out = _render(side, STEP_PRESET, size, features, clock)
            # Stock's first turn may be the first of its process, which on an H200 is not repeated to the bit.
            repeats[name] &= turn < 2 or torch.equal(out, outputs[name])
            outputs[name] = out
            peak = _peak_gib()
            if turn == 0:
                first_peaks[name] = peak
                continue
            peaks[name] = max(peaks.get(name, 0.0), peak)
            times[name] += [1000 * seconds for seconds in clock.seconds_per_step]
    stock, rows = record.spread(times["off"]), []
    for quality in sides:
        if quality == "off":
            continue
        equal = torch.equal(outputs["off"], outputs[quality])
        ours = record.spread(times[quality])
        comparable = equal or quality != "lossless"
        rows.append(
            {
                "size": size,
                "quality": quality,
                "step_ms": ours["median"],
                "step_ms_spread": ours,
                "stock_step_ms": stock["median"],
                "stock_step_ms_spread": stock,
                "ratio_to_stock": stock["median"] / ours["median"] if comparable else None,
                "equal_to_stock": equal,
                "repeats_itself": repeats[quality],
                "peak_gib": peaks[quality],
                "stock_peak_gib": peaks["off"],
                "first_peak_gib": first_peaks[quality],
                "stock_first_peak_gib": first_peaks["off"],
            }
        )
    return rows


def _generation_rows(sides: Mapping[str, Any], preset: str, size: int) -> Sequence[dict[str, Any]]:
    """One row a side: seconds of a whole generation, sampler included, text encoder and VAE not."""
    rows: list[dict[str, Any]] = []
    features = _features(sides["off"])
    for name, side in sides.items():
        seconds = []
        for _ in range(GENERATIONS):
            start = time.perf_counter()
            latent = _render(side, preset, size, features)
            seconds.append(time.perf_counter() - start)
        spread = record.spread(seconds[1:])
        md5 = hashlib.md5(latent.float().cpu().numpy().tobytes(), usedforsecurity=False).hexdigest()
        rows.append({"preset": preset, "size": size, "quality": name, "seconds": spread["median"], "latent_md5": md5})
        rows[-1]["seconds_spread"] = spread
    for row in rows:
        row["equal_to_stock"] = row["latent_md5"] == rows[0]["latent_md5"]
        comparable = row["equal_to_stock"] or row["quality"] != "lossless"
        row["ratio_to_stock"] = rows[0]["seconds"] / row["seconds"] if comparable else None
    return rows


def _features(model: Any) -> torch.Tensor:
    return random_features(model.model.diffusion_model.llm_cond_norm.normalized_shape[0])


def _render(model: Any, preset_name: str, size: int, features: torch.Tensor, on_step: Any = None) -> torch.Tensor:
    """The latent of one generation, on the CPU."""
    from ..hosts.comfyui.sampling import find_preset, make_guider, preset_sigmas, sample

    latent = {"samples": torch.zeros(1, 128, size // 16, size // 16)}
    preset = find_preset(preset_name)
    levels = preset_sigmas(model, latent, preset)
    if on_step is not None and size >= LARGE:
        levels = torch.cat((levels[:STEPS_OF_LARGE], levels[-1:]))
    guider = make_guider(model, [[features, {}]], preset, levels)
    samples: torch.Tensor = sample(guider, levels, latent, 0, on_step)["samples"]
    return samples.cpu()


def _forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 1024**3 if torch.cuda.is_available() else 0.0


if __name__ == "__main__":
    main()
