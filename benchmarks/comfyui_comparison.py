"""Renders the comparison in a real ComfyUI at full size and keeps its report.

    COMFYUI_PATH=... python -m ideogram4_fusion.benchmarks.comfyui_comparison
        [--checkpoint FILE] [--vae FILE] [--presets INSTANT_8 FAST_20] [--qualities off lossless] [--size 1024]
        [--patcher dynamic|plain] [--output FOLDER]

Run it with ComfyUI's own Python, PYTHONPATH naming a folder in which this pack lies, or is linked, as
`ideogram4_fusion` (`make lint` makes `build/` one). Without a checkpoint or a VAE, random weights of the official size
take their place, the VAE's from diffusers: equality and speed are the same, the pictures are noise. The prompt is
random text features in either case.
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
from .random_checkpoint import random_features, write_random_checkpoint


def random_vae_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Random weights of the Flux 2 VAE, under diffusers' names."""
    from diffusers import AutoencoderKLFlux2

    torch.manual_seed(0)
    with torch.device(device):
        state: dict[str, torch.Tensor] = AutoencoderKLFlux2().state_dict()
    return {name: tensor.cpu() for name, tensor in state.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--vae", type=Path)
    parser.add_argument("--presets", nargs="+", default=["INSTANT_8", "FAST_20"])
    parser.add_argument("--qualities", nargs=2, default=["off", "lossless"])
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patcher", choices=["dynamic", "plain"], default="dynamic")
    parser.add_argument("--output", type=Path, default=record.RESULTS)
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dynamic = on_gpu and options.patcher == "dynamic"
    start_comfyui(Path(os.environ.get("COMFYUI_PATH", "")), on_gpu=on_gpu, dynamic=dynamic)
    compare(options)


@torch.inference_mode()
def compare(options: argparse.Namespace) -> None:
    """Loads the models once and keeps one report a preset."""
    import comfy.model_management
    import comfy.sd
    import comfy.utils

    from ..comparison.report import as_dict, text
    from ..hosts.comfyui.comparison import compare_qualities
    from ..hosts.comfyui.load import describe_file, load_diffusion_model
    from ..hosts.comfyui.sampling import find_preset

    device = comfy.model_management.get_torch_device()
    with tempfile.TemporaryDirectory() as scratch:
        file = options.checkpoint or write_random_checkpoint(Path(scratch, "random.safetensors"))
        model = load_diffusion_model(file)
        vae_state = comfy.utils.load_torch_file(str(options.vae)) if options.vae else random_vae_state(device)
        vae = comfy.sd.VAE(sd=vae_state)
        features = random_features(seed=options.seed)
        latent: dict[str, Any] = {"samples": torch.zeros(1, 128, options.size // 16, options.size // 16)}
        checkpoint = record.checkpoint(file, describe_file(file))
        for name in options.presets:
            result = compare_qualities(
                model,
                [[features, {}]],
                latent,
                vae,
                find_preset(name),
                options.seed,
                tuple(options.qualities),
            )
            print(f"{text(result.report)}\n", flush=True)
            a, b = options.qualities
            record.write(
                options.output / f"comfyui_{options.patcher}_{name}_{options.size}_{a}_{b}.json",
                {
                    "origin": record.origin(device),
                    "host": "ComfyUI",
                    "patcher": options.patcher,
                    "checkpoint": checkpoint,
                    "report": as_dict(result.report),
                    "text": text(result.report),
                },
            )


if __name__ == "__main__":
    main()
