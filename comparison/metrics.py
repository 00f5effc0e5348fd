"""How far apart two pictures, or two latents, are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .images import paired

SSIM_WINDOW = 11


@dataclass(frozen=True)
class ImageMetrics:
    """Differences between the RGB values of two batches of images, peak value 1.

    `values` were compared, `differing` are unequal (NaN is unequal to everything); `nonfinite_a` and `nonfinite_b`
    count NaN and infinities in all channels. With any of those, the metrics below are None.

    `max_abs` and `mse` are over the whole batch, and `psnr_db` = -10 log10(mse), inf when nothing differs;
    `psnr_per_image` is the same image by image. `ssim` is the batch's mean (Wang et al., 2004), None too when
    kornia is missing or a side is below 11 pixels. `alpha_differs` compares the fourth channels, an absent one
    counting as opaque; None when neither image has one.
    """

    values: int
    differing: int
    nonfinite_a: int
    nonfinite_b: int
    max_abs: float | None
    mse: float | None
    psnr_db: float | None
    psnr_per_image: tuple[float, ...] | None
    ssim: float | None
    alpha_differs: bool | None


@dataclass(frozen=True)
class LatentMetrics:
    """How many of two latents' `values` are `differing`, byte for byte, and how many are NaN or infinite."""

    values: int
    differing: int
    nonfinite_a: int = 0
    nonfinite_b: int = 0


def compare(a: Tensor, b: Tensor) -> ImageMetrics:
    """Compares images [B, H, W, 3 or 4], floating point in 0..1; sums are taken in float64.

    Raises what `images.paired` raises: sizes must be equal, a batch of one is held against every image of the other.
    """
    a, b = paired(a, b)
    rgb_a, rgb_b = a[..., :3], b[..., :3]
    counts = {
        "values": rgb_a.numel(),
        "differing": int((rgb_a != rgb_b).sum()),
        "nonfinite_a": _nonfinite(a),
        "nonfinite_b": _nonfinite(b),
    }
    alpha_differs = _alpha_differs(a, b)
    if counts["nonfinite_a"] or counts["nonfinite_b"]:
        return ImageMetrics(
            **counts,
            max_abs=None,
            mse=None,
            psnr_db=None,
            psnr_per_image=None,
            ssim=None,
            alpha_differs=alpha_differs,
        )
    max_abs, errors = 0.0, []
    for image_a, image_b in zip(rgb_a, rgb_b, strict=True):
        difference = (image_a.double() - image_b.double()).abs()
        largest = float(difference.max())
        max_abs = max(max_abs, largest)
        errors.append(_rms(difference, largest))
    rms = math.hypot(*errors) / math.sqrt(len(errors))
    return ImageMetrics(
        **counts,
        max_abs=max_abs,
        mse=rms * rms,
        psnr_db=_psnr(rms),
        psnr_per_image=tuple(_psnr(error) for error in errors),
        ssim=_ssim(rgb_a, rgb_b),
        alpha_differs=alpha_differs,
    )


def compare_latents(a: Tensor, b: Tensor) -> LatentMetrics:
    """Counts differing and non-finite values of two latents; shapes, dtypes and errors as in `differing_values`."""
    return LatentMetrics(
        values=a.numel(),
        differing=differing_values(a, b),
        nonfinite_a=_nonfinite(a.double()),  # float8 has no isfinite of its own
        nonfinite_b=_nonfinite(b.double()),
    )


def differing_values(a: Tensor, b: Tensor) -> int:
    """The number of elements whose bytes differ: -0 differs from +0, a NaN equals the NaN of the same bits.

    Raises ValueError when shapes or dtypes differ.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"shapes and dtypes must agree: {list(a.shape)} {a.dtype}, {list(b.shape)} {b.dtype}")
    return int((_bytes(a) != _bytes(b)).any(dim=-1).sum())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1, 1).view(torch.uint8)


def _nonfinite(values: Tensor) -> int:
    return int((~values.isfinite()).sum())


def _alpha_differs(a: Tensor, b: Tensor) -> bool | None:
    if a.shape[-1] == b.shape[-1] == 3:
        return None
    alpha_a, alpha_b = (x[..., 3] if x.shape[-1] == 4 else torch.ones(x.shape[:-1]) for x in (a, b))
    return bool((alpha_a != alpha_b).any())


def _rms(difference: Tensor, largest: float) -> float:
    """Root mean square; of the quotients by `largest`, since the square of 1e-200 is 0 and that of 1e200 infinite."""
    if largest == 0.0 or math.isinf(largest):
        return largest
    return largest * math.sqrt(float((difference / largest).square().mean()))


def _psnr(rms: float) -> float:
    if rms == 0.0:
        return math.inf
    return -20.0 * math.log10(rms)


def _ssim(a: Tensor, b: Tensor) -> float | None:
    """Mean structural similarity of [B, H, W, 3], Gaussian window, only where the whole window lies in the picture."""
    if min(a.shape[1:3]) < SSIM_WINDOW:
        return None
    if torch.equal(a, b):
        return 1.0  # by definition, and the case most often met: saves seconds on large pictures
    try:
        from kornia.metrics import ssim
    except ImportError:
        return None
    # In float32 the variances, differences of nearly equal numbers, would carry errors of about 1e-4 of the constant
    # that steadies them; and one plane at a time keeps a dozen float64 temporaries of a 2048 x 2048 picture small.
    # eps = 0, since the constants already keep the denominator from zero and skimage has no such term.
    planes = [
        float(ssim(x.double()[None, None], y.double()[None, None], SSIM_WINDOW, 1.0, 0.0, "valid").mean())
        for image_a, image_b in zip(a, b, strict=True)
        for x, y in zip(image_a.unbind(-1), image_b.unbind(-1), strict=True)
    ]
    return math.fsum(planes) / len(planes)
