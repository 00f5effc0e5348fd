"""What every results file says about its origin, and how repeated timings are summed up."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
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
    """Versions, GPU, commit and time (UTC), for the head of a results file."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {**describe_environment(device), "commit": commit(), "measured": now}


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
