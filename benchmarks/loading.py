"""Time and memory that loading takes, against ComfyUI's own Load Diffusion Model with the same file.

    COMFYUI_PATH=~/ComfyUI python -m ideogram4_fusion.benchmarks.loading [--layers 34] [--runs 3] [--out FILE]

Each load is a process of its own, with the file in the page cache, and weights stay in fp8: core is asked for that
where the file does not say it. core reads the official row-wise file without its scales, so that its model is of no
use; what it costs is measured all the same.

Weights that are taken over from the file are read from it only when they are used. So `seconds` has two parts, and
memory is taken after both: until the loader returns (`load_seconds`), and until every weight has been copied once, one
at a time, which is what moving it to a GPU does. `peak_rss` counts mapped pages of the file besides the process's own
memory, `anonymous` the latter alone; in bytes, and with what Python, PyTorch and ComfyUI take before (`rss_before`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from .record import RESULTS, origin, spread, write

FILES = ("fp8_row_wise", "fp8_scaled")
LOADERS = ("core", "pack")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=34)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the files, 9.3 GB each at 34 layers; they are deleted")
    parser.add_argument("--out", type=Path, default=RESULTS / "loading.json")
    parser.add_argument("--load", nargs=2, metavar=("LOADER", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(_load(arguments.load[0], Path(arguments.load[1]))))
        return
    rows = []
    for weights in FILES:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            file = Path(folder) / "model.safetensors"
            # In another process: what writing the file took must not be held while it is loaded.
            _python("random_checkpoint", str(file), "--layers", str(arguments.layers), "--weights", weights)
            rows.append({"weights": weights, "file_bytes": file.stat().st_size, **_compare(file, arguments.runs)})
            print(json.dumps(rows[-1], indent=1))
    write(arguments.out, {**origin(torch.device("cpu")), "layers": arguments.layers, "rows": rows})


def _compare(file: Path, runs: int) -> dict[str, Any]:
    """Alternately, so that whatever else the machine does falls on both."""
    _touch(file)
    seen: dict[str, list[dict[str, float]]] = {loader: [] for loader in LOADERS}
    for _ in range(runs):
        for loader in LOADERS:
            seen[loader].append(json.loads(_python("loading", "--load", loader, str(file)).splitlines()[-1]))
    found: dict[str, Any] = {
        loader: {name: spread([run[name] for run in seen[loader]]) for name in seen[loader][0]} for loader in LOADERS
    }
    return {
        **found,
        "pack_of_core": {
            name: found["pack"][name]["median"] / found["core"][name]["median"] for name in ("seconds", "peak_rss")
        },
    }


def _python(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"ideogram4_fusion.benchmarks.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
    return done.stdout


def _touch(file: Path) -> None:
    with file.open("rb") as opened:
        while opened.read(1 << 24):
            pass


def _load(loader: str, file: Path) -> dict[str, float]:
    from .comfyui_process import start_comfyui

    on_gpu = torch.cuda.is_available()
    start_comfyui(Path(os.environ["COMFYUI_PATH"]), on_gpu=on_gpu, dynamic=False)
    import comfy.sd

    from ..hosts.comfyui.load import load_diffusion_model
    from ..hosts.comfyui.row_wise import FP8

    # What core's node sets for weight_dtype fp8_e4m3fn. A file of ComfyUI's own says its format itself.
    options = {"dtype": torch.float8_e4m3fn} if "comfy_quant" not in _names(file) else {}
    before = _status("VmRSS")
    start = time.perf_counter()
    with torch.inference_mode():
        if loader == "core":
            model = comfy.sd.load_diffusion_model(str(file), options)
        else:
            model = load_diffusion_model(file, FP8)
        loaded = time.perf_counter()
        weights = list(model.model.state_dict().values())
        for weight in weights:
            weight.clone()
    read = time.perf_counter()
    return {
        "load_seconds": loaded - start,
        "seconds": read - start,
        "rss_before": before,
        "peak_rss": _status("VmHWM"),
        "anonymous": _status("RssAnon"),
        "weight_bytes": sum(weight.nbytes for weight in weights),
    }


def _names(file: Path) -> str:
    """The header's text."""
    with file.open("rb") as opened:
        return opened.read(int.from_bytes(opened.read(8), "little")).decode()


def _status(name: str) -> int:
    """A line of Linux' /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
