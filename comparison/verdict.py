"""The one line that says how two renders compare."""

from __future__ import annotations

from .metrics import ImageMetrics, LatentMetrics
from .rounding import floored

CLOSE_DB = 25.0
"""Least PSNR that is called close: SGLang's bar for its quality mode "high" (sgl-project/sglang#33822)."""


def verdict(metrics: ImageMetrics, latents: LatentMetrics | None = None, nothing_fused: str | None = None) -> str:
    """IDENTICAL, CLOSE, NOT CLOSE or NOT COMPARED, each with its reason or number.

    `nothing_fused` is the reason why a side that asked for fusion ran stock; two stock renders prove nothing. PSNR is
    that of the worst image, rounded down. Only equal pixels, alpha and (when given) latents are IDENTICAL.
    """
    if nothing_fused is not None:
        return f"NOT COMPARED: nothing was fused ({nothing_fused})"
    # Latents too: a VAE may decode NaN to plain black.
    for what, found in (("pixels", metrics), ("latents", latents)):
        nonfinite = {"A": found.nonfinite_a, "B": found.nonfinite_b} if found is not None else {}
        sides = [f"{name} ({count:,} values)" for name, count in nonfinite.items() if count]
        if sides:
            return f"NOT COMPARED: non-finite {what} in {' and '.join(sides)}"
    if metrics.differing:
        return _distance(metrics)
    pixels = f"0 of {metrics.values:,} pixel values"
    if metrics.alpha_differs:
        return f"CLOSE: {pixels} differ, but the alpha channels do"
    if latents is None:
        return f"IDENTICAL: {pixels} differ"
    if latents.differing:
        return f"CLOSE: {pixels} differ, but {latents.differing:,} of {latents.values:,} latent values do"
    return f"IDENTICAL: {pixels} and 0 of {latents.values:,} latent values differ"


def _distance(metrics: ImageMetrics) -> str:
    per_image = metrics.psnr_per_image or ()
    worst = min(per_image)
    batch = f" (worst of {len(per_image)} images)" if len(per_image) > 1 else ""
    decibels = f"{floored(worst, 1)} dB{batch}"
    return (
        f"CLOSE: {decibels}" if worst >= CLOSE_DB else f"NOT CLOSE: {decibels}, which fails the bar of {CLOSE_DB:g} dB"
    )
