"""How far sequences of pictures and of latents are from others, summed up over captions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..comparison.metrics import compare


def compared(name: str, ours: Sequence[torch.Tensor], other: str, theirs: Sequence[torch.Tensor]) -> dict[str, Any]:
    """PSNR, SSIM and how many are identical, of pictures [1, H, W, 3], one for each caption.

    Raises:
        ValueError: a picture is not finite: its metrics are None, which must not count as a PSNR without a difference.
        RuntimeError: kornia is missing, by which SSIM is computed.
    """
    psnr_db: list[float] = []
    ssim: list[float] = []
    # An SSIM is a third of a second of one core, of which a machine with a GPU has many.
    with ThreadPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = list(pool.map(compare, ours, theirs))
    for caption, metrics in enumerate(found):
        if metrics.psnr_db is None:
            side, wrong = (name, metrics.nonfinite_a) if metrics.nonfinite_a else (other, metrics.nonfinite_b)
            raise ValueError(f"{side}, caption {caption}: {wrong} values of the picture are not finite")
        if metrics.ssim is None:
            raise RuntimeError("SSIM needs kornia, which is not installed")
        psnr_db.append(metrics.psnr_db)
        ssim.append(metrics.ssim)
    return {
        f"psnr_db_to_{other}": spread(psnr_db),
        f"ssim_to_{other}": spread(ssim),
        f"identical_to_{other}": sum(metrics.differing == 0 for metrics in found),
    }


def errors(ours: Sequence[Sequence[torch.Tensor]], theirs: Sequence[Sequence[torch.Tensor]]) -> list[float]:
    """Relative L2 error at each step, the median over the captions."""
    captions = [[relative(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(ours, theirs, strict=True)]
    return [statistics.median(step) for step in zip(*captions, strict=True)]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and all of them; the infinite PSNR of equal pictures as null, since JSON has no infinity."""
    median, least, *each = (None if math.isinf(v) else v for v in (statistics.median(values), min(values), *values))
    return {"median": median, "min": least, "values": each}
