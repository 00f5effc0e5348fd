"""The comparison of two renders as text and as JSON-ready data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .metrics import ImageMetrics, LatentMetrics
from .rounding import ceiled, floored
from .verdict import verdict

_GIB = 1024**3


@dataclass(frozen=True)
class Render:
    """One side: its quality, what was mounted, and what it cost.

    Times are in seconds, `seconds_per_step` in sampling order; `note` says what the times include, if anything unusual
    (a first compilation, say). `peak_memory_bytes` is the device's, None when it was not measured.
    """

    quality: str
    status: str
    seconds_per_step: Sequence[float]
    total_seconds: float
    peak_memory_bytes: int | None = None
    note: str | None = None


@dataclass(frozen=True)
class Report:
    """Two renders of one preset, size (pixels) and seed, and how their results differ.

    `sigmas` are the noise levels used; `environment` is what `environment.describe_environment` returns and the host's
    own versions; `latents` is None when they were not kept. `nothing_fused` is the reason when a side that asked for
    fusion ran stock: the text then leaves out what would compare stock with itself.
    """

    a: Render
    b: Render
    metrics: ImageMetrics
    preset: str
    width: int
    height: int
    seed: int
    sigmas: Sequence[float]
    environment: dict[str, str] = field(default_factory=dict)
    latents: LatentMetrics | None = None
    size_note: str | None = None
    nothing_fused: str | None = None

    @property
    def verdict(self) -> str:
        """The line that `verdict.verdict` makes of these results."""
        return verdict(self.metrics, self.latents, self.nothing_fused)

    @property
    def _explained(self) -> bool:
        """Whether a time comes with a note, and so is not held against another."""
        return bool(self.a.note or self.b.note)

    @property
    def step_ratio(self) -> float | None:
        """Median time per step of B over A; None when either was not timed, or its time needs an explanation."""
        if self._explained or not self.a.seconds_per_step or not self.b.seconds_per_step:
            return None
        return _ratio(statistics.median(self.b.seconds_per_step), statistics.median(self.a.seconds_per_step))

    @property
    def total_ratio(self) -> float | None:
        """Total time of B over A; None when A was not timed, or a time needs an explanation."""
        return None if self._explained else _ratio(self.b.total_seconds, self.a.total_seconds)


def text(report: Report) -> str:
    """The report for people, verdict first: agreement rounded down, differences, time ratios and memory rounded up."""
    sections = [
        [report.verdict],
        _picture_lines(report) if report.nothing_fused is None else [],
        _render_lines("A", report.a),
        _render_lines("B", report.b),
        _ratio_lines(report) if report.nothing_fused is None else [],
        _setting_lines(report),
        [f"{name}: {value}" for name, value in report.environment.items()],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def as_dict(report: Report) -> dict[str, Any]:
    """The report as strict JSON data, unrounded: the dataclasses' fields, with `verdict`, `step_ratio`, `total_ratio`.

    JSON has no infinity: the PSNR of identical images is the string "inf".
    """
    derived = {"verdict": report.verdict, "step_ratio": report.step_ratio, "total_ratio": report.total_ratio}
    return {name: _json_ready(value) for name, value in {**derived, **asdict(report)}.items()}


def _json_ready(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _ratio(b: float, a: float) -> float | None:
    return b / a if a > 0 else None


def _picture_lines(report: Report) -> list[str]:
    metrics = report.metrics
    lines = []
    broken = report.latents is not None and bool(report.latents.nonfinite_a or report.latents.nonfinite_b)
    if metrics.psnr_db is not None and not broken:
        identical = metrics.differing == 0
        lines.append("PSNR: inf (identical)" if identical else f"PSNR: {floored(metrics.psnr_db, 2)} dB")
        if metrics.psnr_per_image and len(metrics.psnr_per_image) > 1:
            lines.append(f"PSNR by image: {', '.join(floored(value, 2) for value in metrics.psnr_per_image)} dB")
        ssim = "not measured (kornia missing, or a side below 11 pixels)"
        lines.append(f"SSIM: {ssim if metrics.ssim is None else floored(metrics.ssim, 4)}")
    lines.append(f"pixels: {metrics.differing:,} of {metrics.values:,} values differ")
    if metrics.max_abs is not None:
        levels = ceiled(metrics.max_abs * 255, 1)
        lines.append(f"largest difference: {ceiled(metrics.max_abs, 5)} ({levels} of 255 levels)")
    if metrics.nonfinite_a or metrics.nonfinite_b:
        lines.append(f"non-finite values: {metrics.nonfinite_a:,} in A, {metrics.nonfinite_b:,} in B")
    if metrics.alpha_differs is not None:
        lines.append(f"alpha: {'differs' if metrics.alpha_differs else 'equal'}")
    if report.latents is not None:
        lines.append(f"latents: {report.latents.differing:,} of {report.latents.values:,} values differ, byte for byte")
        if broken:
            lines.append(
                f"non-finite latents: {report.latents.nonfinite_a:,} in A, {report.latents.nonfinite_b:,} in B"
            )
        elif metrics.differing and not report.latents.differing:
            lines.append("The latents are identical: the difference arose while they were decoded.")
    return lines


def _render_lines(side: str, render: Render) -> list[str]:
    lines = [f"{side}: {render.quality}", f"mounted: {render.status}"]
    times = render.seconds_per_step
    if times:
        spread = f"{min(times):.4f}..{max(times):.4f}"
        lines.append(f"seconds per step: {statistics.median(times):.4f} median of {len(times)}, {spread}")
    else:
        lines.append("seconds per step: not measured")
    lines.append(f"total: {render.total_seconds:.3f} s")
    if render.peak_memory_bytes is not None:
        lines.append(f"peak memory: {ceiled(render.peak_memory_bytes / _GIB, 2)} GiB allocated by PyTorch")
    if render.note:
        lines.append(f"note: {render.note}")
    return lines


def _ratio_lines(report: Report) -> list[str]:
    same = report.a.quality == report.b.quality
    b, a = ("B", "A") if same else (report.b.quality, report.a.quality)
    return [
        f"{what}: {b} took {ceiled(ratio, 3)} x the time of {a}"
        for what, ratio in (("per step", report.step_ratio), ("in total", report.total_ratio))
        if ratio is not None
    ]


def _setting_lines(report: Report) -> list[str]:
    lines = [
        f"preset: {report.preset}",
        f"size: {report.width} x {report.height} pixels",
        f"seed: {report.seed}",
        f"sigmas: {' '.join(f'{sigma:.5f}' for sigma in report.sigmas)}",
    ]
    if report.size_note:
        lines.append(f"note: {report.size_note}")
    return lines
