"""Metrics against scikit-image, and the rules for what may be compared."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from ideogram4_fusion.comparison.metrics import compare, compare_latents, differing_values
from torch import Tensor

# Both sum the same float64 terms, in another order. A local moment of values in 0..1 is good to the 22 roundings of
# two 11-tap filters, 2.4e-15; SSIM divides moments by at least C2 = 9e-4, so 1e-11 leaves room for a few such terms.
SSIM_TOLERANCE = 1e-11


def picture(*shape: int, seed: int = 0) -> Tensor:
    """Smooth shapes with some grain, so that windows have both flat and busy content."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(shape[0], shape[3], 4, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=shape[1:3], mode="bicubic").movedim(1, -1)
    return (smooth + 0.02 * torch.randn(shape, generator=generator)).clamp(0, 1)


def noisy(image: Tensor, strength: float, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (image + strength * torch.randn(image.shape, generator=generator)).clamp(0, 1)


@pytest.mark.parametrize("size", [(64, 64), (37, 53), (11, 11), (11, 90)])
def test_ssim_is_that_of_scikit_image(size: tuple[int, int]) -> None:
    pytest.importorskip("kornia")
    skimage = pytest.importorskip("skimage.metrics")
    a = picture(2, *size, 3)
    b = noisy(a, 0.03)
    expected = [
        skimage.structural_similarity(
            x.double().numpy(),
            y.double().numpy(),
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=1.0,
            channel_axis=-1,
        )
        for x, y in zip(a, b, strict=True)
    ]
    assert compare(a, b).ssim == pytest.approx(sum(expected) / 2, rel=0, abs=SSIM_TOLERANCE)


@pytest.mark.parametrize("strength", [1e-4, 0.01, 0.3])
def test_psnr_is_that_of_scikit_image(strength: float) -> None:
    skimage = pytest.importorskip("skimage.metrics")
    a = picture(3, 33, 47, 3)
    b = noisy(a, strength)
    metrics = compare(a, b)
    doubles = a.double().numpy(), b.double().numpy()
    assert metrics.psnr_db == pytest.approx(skimage.peak_signal_noise_ratio(*doubles, data_range=1.0), rel=1e-12)
    expected = [skimage.peak_signal_noise_ratio(x, y, data_range=1.0) for x, y in zip(*doubles, strict=True)]
    assert metrics.psnr_per_image == pytest.approx(expected, rel=1e-12)
    assert metrics.mse == pytest.approx(skimage.mean_squared_error(*doubles), rel=1e-12)


def test_counts_and_the_largest_difference() -> None:
    a = torch.full((1, 20, 30, 3), 0.5)
    b = a.clone()
    b[0, 3, 4, 1] = 0.75
    b[0, 5, 6, 2] = 0.375
    metrics = compare(a, b)
    assert (metrics.values, metrics.differing) == (1800, 2)
    assert metrics.max_abs == 0.25
    assert metrics.mse == pytest.approx((0.25**2 + 0.125**2) / 1800, rel=1e-12)


def test_identical_pictures() -> None:
    a = picture(1, 24, 24, 3)
    metrics = compare(a, a.clone())
    assert metrics.differing == 0
    assert metrics.psnr_db == math.inf
    assert metrics.psnr_per_image == (math.inf,)
    assert (metrics.ssim, metrics.max_abs, metrics.mse) == (1.0, 0.0, 0.0)


def test_the_smallest_float_step_is_seen() -> None:
    a = torch.full((1, 16, 16, 3), 0.5)
    b = a.clone()
    b[0, 0, 0, 0] = torch.nextafter(b[0, 0, 0, 0], torch.tensor(1.0))
    metrics = compare(a, b)
    assert metrics.differing == 1
    assert metrics.psnr_db is not None and metrics.psnr_db < math.inf


def test_half_precision_is_compared_without_rounding_the_other_side() -> None:
    a = picture(1, 16, 16, 3)
    metrics = compare(a, a.to(torch.bfloat16))
    assert metrics.max_abs == float((a.double() - a.to(torch.bfloat16).double()).abs().max()) > 0


def test_different_sizes_are_refused_with_both_sizes() -> None:
    with pytest.raises(ValueError, match="A 100 x 64 and B 99 x 64") as error:
        compare(picture(1, 64, 100, 3), picture(1, 64, 99, 3))
    assert "none is resized" in str(error.value)


def test_one_image_is_held_against_every_image_of_a_batch() -> None:
    one, many = picture(1, 16, 20, 3), picture(3, 16, 20, 3, seed=5)
    repeated = compare(one.repeat(3, 1, 1, 1), many)
    assert compare(one, many) == repeated
    assert compare(many, one).psnr_per_image == repeated.psnr_per_image
    assert repeated.values == 3 * 16 * 20 * 3


def test_batches_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="A has 2 images and B 3"):
        compare(picture(2, 16, 16, 3), picture(3, 16, 16, 3))


@pytest.mark.parametrize("shape", [(16, 16, 3), (1, 16, 16, 1), (1, 3, 16, 16), (0, 16, 16, 3)])
def test_what_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"image B must be \[batch, height, width, 3 or 4\]"):
        compare(picture(1, 16, 16, 3), torch.zeros(shape))


def test_bytes_are_refused_since_their_peak_is_not_one() -> None:
    with pytest.raises(TypeError, match="image A must be floating point"):
        compare(torch.zeros(1, 16, 16, 3, dtype=torch.uint8), picture(1, 16, 16, 3))


def test_alpha_is_compared_apart_from_rgb() -> None:
    rgb = picture(1, 16, 16, 3)
    opaque = torch.cat([rgb, torch.ones(1, 16, 16, 1)], dim=-1)
    faded = torch.cat([rgb, torch.full((1, 16, 16, 1), 0.5)], dim=-1)
    assert compare(rgb, rgb).alpha_differs is None
    assert compare(rgb, opaque).alpha_differs is False
    assert compare(opaque, faded).alpha_differs is True
    assert compare(faded, rgb).alpha_differs is True
    assert compare(opaque, faded).differing == 0
    assert compare(opaque, faded).psnr_db == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_counted_and_stop_the_metrics(value: float) -> None:
    a = picture(1, 16, 16, 3)
    b = a.clone()
    b[0, :2, 0, 0] = value
    metrics = compare(a, b)
    assert (metrics.nonfinite_a, metrics.nonfinite_b) == (0, 2)
    assert (metrics.psnr_db, metrics.psnr_per_image, metrics.ssim, metrics.mse, metrics.max_abs) == (None,) * 5
    assert compare(b, a).nonfinite_a == 2


def test_ssim_needs_a_whole_window() -> None:
    metrics = compare(picture(1, 10, 40, 3), picture(1, 10, 40, 3, seed=2))
    assert metrics.ssim is None
    assert metrics.psnr_db is not None


def test_without_kornia_everything_but_ssim_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kornia.metrics", None)
    metrics = compare(picture(1, 16, 16, 3), picture(1, 16, 16, 3, seed=2))
    assert metrics.ssim is None
    assert metrics.psnr_db is not None


def test_latents_are_compared_byte_for_byte() -> None:
    a = torch.tensor([0.0, 1.0, math.nan, math.inf, 2.0])
    b = torch.tensor([-0.0, 1.0, math.nan, math.inf, 2.0])
    assert differing_values(a, b) == 1
    payload = a.clone()
    payload.view(torch.int32)[2] ^= 1
    assert payload[2].isnan()
    assert differing_values(a, payload) == 1
    assert differing_values(payload, payload.clone()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64])
def test_byte_equality_in_every_width(dtype: torch.dtype) -> None:
    a = torch.arange(24.0).reshape(2, 3, 4).to(dtype)
    b = a.clone()
    b[1, 2, 3] = 100
    b[0, 0, 1] = 100
    assert differing_values(a, b) == 2
    assert differing_values(a.transpose(0, 2), b.transpose(0, 2)) == 2
    assert compare_latents(a, b).values == 24


@pytest.mark.parametrize("other", [torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.float16)])
def test_latents_of_other_shape_or_dtype_are_refused(other: Tensor) -> None:
    with pytest.raises(ValueError, match="shapes and dtypes must agree"):
        differing_values(torch.zeros(3, 2), other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e5m2])
def test_latents_that_are_not_finite_are_counted(dtype: torch.dtype) -> None:
    a = torch.tensor([0.0, math.nan, math.inf, -math.inf]).to(dtype)
    metrics = compare_latents(a, torch.zeros(4).to(dtype))
    assert (metrics.nonfinite_a, metrics.nonfinite_b) == (3, 0)
