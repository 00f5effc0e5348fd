"""What every results file says about its origin, and how repeated timings are summed up."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..comparison.environment import describe_environment

RANDOM = "random_weights"  # in a file's metadata
RESULTS = Path(__file__).resolve().parent / "results"


def commit() -> str:
    """The commit that was measured, marked where the tree differs from it.

    GIT_COMMIT has the first word: a run of several scripts changes results/, and a copy of the tree may have no
    history, or lie in another repository's. Without both it is `unknown`.
    """
    told = os.environ.get("GIT_COMMIT")
    if told:
        return told
    shown = subprocess.run(
        ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return shown.stdout.strip() or "unknown"


def origin(device: torch.device) -> dict[str, str]:
    """Versions, GPU and its allocator, CPU, commit and time (UTC), for the head of a results file."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found = {**describe_environment(device), **_comfyui()}
    if device.type == "cuda":
        found["allocator"] = torch.cuda.get_allocator_backend()
    return {**found, "cpu": _cpu(), "commit": commit(), "measured": now}


def _comfyui() -> dict[str, str]:
    """Versions of ComfyUI and of what it computes with, where this process runs one."""
    if "comfy" not in sys.modules:
        return {}
    from comfyui_version import __version__

    return {"comfyui": __version__, **{name: metadata.version(name) for name in ("comfy-kitchen", "comfy-aimdo")}}


def _cpu() -> str:
    """The processor, which sets the time of a step that waits for Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def checkpoint(file: Path, description: str) -> str:
    """A checkpoint's description, and that its weights are random where its metadata says so."""
    with safe_open(file, framework="pt") as opened:
        made_up = (opened.metadata() or {}).get(RANDOM) is not None
    return f"{description}, random weights" if made_up else description


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median with the quartiles, the least and the most, in the unit of `times`."""
    lower, median, upper = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {"median": median, "q1": lower, "q3": upper, "min": min(times), "max": max(times), "runs": len(times)}


def write(path: Path, data: dict[str, Any]) -> None:
    """Writes a results file as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
