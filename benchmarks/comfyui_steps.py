"""Times a step of the model in a real ComfyUI, stock and fused, by size, and says whether the outputs are equal.

    COMFYUI_PATH=... python -m ideogram4_fusion.benchmarks.comfyui_steps
        [--checkpoint FILE] [--sizes 256 512 1024 2048] [--quality lossless] [--patcher dynamic|plain] [--rounds 3]
        [--output FILE]

Run it like comfyui_comparison. Stock and fused take turns, the first turn of each is thrown away, a ratio is that of
the medians of one run. A step is the time between two steps of core's Euler sampler, so that it holds everything that a
user waits for. A size whose outputs differ gets no ratio in `lossless`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from . import record
from .comfyui_process import start_comfyui
from .random_checkpoint import TEXT, write_random_checkpoint

TEXT_TOKENS = 256
PRESET = "FAST_20"
LARGE, STEPS_OF_LARGE = 1536, 6  # pixels from which on fewer steps do: a step is then most of a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--quality", default="lossless")
    parser.add_argument("--patcher", choices=["dynamic", "plain"], default="dynamic")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    dynamic = options.patcher == "dynamic"
    start_comfyui(Path(os.environ.get("COMFYUI_PATH", "")), on_gpu=True, dynamic=dynamic)
    with tempfile.TemporaryDirectory() as scratch:
        file = options.checkpoint or write_random_checkpoint(Path(scratch, "random.safetensors"))
        results = run(file, options.sizes, options.quality, options.rounds)
    results["checkpoint"] += "" if options.checkpoint else ", random weights"
    results["patcher"] = options.patcher
    record.write(options.output or record.RESULTS / f"comfyui_steps_{options.patcher}.json", results)


@torch.inference_mode()
def run(file: Path, sizes: list[int], quality: str, rounds: int) -> dict[str, Any]:
    """One row a size."""
    import comfy.model_management

    from ..hosts.comfyui.load import describe_file, load_diffusion_model
    from ..hosts.comfyui.quality import set_quality, status

    model = load_diffusion_model(file)
    fused, _ = set_quality(model, quality)
    rows = []
    for size in sizes:
        rows.append({**_row(model, fused, size, rounds, quality), "quality": quality, "status": status(fused)})
        print({k: v for k, v in rows[-1].items() if not k.endswith("spread")}, flush=True)
    device = comfy.model_management.get_torch_device()
    return {"origin": record.origin(device), "host": "ComfyUI", "checkpoint": describe_file(file), "rows": rows}


def _row(model: Any, fused: Any, size: int, rounds: int, quality: str) -> dict[str, Any]:
    times: dict[str, list[float]] = {"off": [], "fused": []}
    outputs: dict[str, torch.Tensor] = {}
    peaks: dict[str, float] = {}
    for turn in range(rounds + 1):
        for name, side in (("off", model), ("fused", fused)):
            torch.cuda.reset_peak_memory_stats()
            outputs[name], steps = _render(side, size)
            peaks[name] = torch.cuda.max_memory_allocated() / 1024**3
            if turn:
                times[name] += steps
    equal = torch.equal(outputs["off"], outputs["fused"])
    stock, ours = record.spread(times["off"]), record.spread(times["fused"])
    return {
        "size": size,
        "step_ms": ours["median"],
        "step_ms_spread": ours,
        "stock_step_ms": stock["median"],
        "stock_step_ms_spread": stock,
        "ratio_to_stock": stock["median"] / ours["median"] if equal or quality != "lossless" else None,
        "equal_to_stock": equal,
        "peak_gib": peaks["fused"],
        "stock_peak_gib": peaks["off"],
    }


def _render(model: Any, size: int) -> tuple[torch.Tensor, list[float]]:
    """The latent, and milliseconds between steps."""
    from ..hosts.comfyui.sampling import StepClock, find_preset, make_guider, preset_sigmas, sample

    latent = {"samples": torch.zeros(1, 128, size // 16, size // 16)}
    preset = find_preset(PRESET)
    levels = preset_sigmas(model, latent, preset)
    if size >= LARGE:
        levels = torch.cat((levels[:STEPS_OF_LARGE], levels[-1:]))
    features = torch.randn(1, TEXT_TOKENS, TEXT, generator=torch.Generator().manual_seed(0))
    guider = make_guider(model, [[features, {}]], preset, levels)
    clock = StepClock()
    samples = sample(guider, levels, latent, 0, clock)["samples"]
    return samples, [1000 * seconds for seconds in clock.seconds_per_step]


if __name__ == "__main__":
    main()
