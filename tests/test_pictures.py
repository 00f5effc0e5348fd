"""The pictures of a comparison: labels above, pixels untouched, an honest gain."""

from __future__ import annotations

import pytest
import torch
from ideogram4_fusion.comparison.pictures import difference, side_by_side
from torch import Tensor

pytest.importorskip("PIL")


def picture(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [(64, 96), (37, 53), (1, 1), (16, 700)])
@pytest.mark.parametrize("batch", [1, 3])
def test_labels_leave_every_pixel_of_both_pictures_alone(size: tuple[int, int], batch: int) -> None:
    height, width = size
    a, b = picture(batch, height, width, 3), picture(batch, height, width, 3, seed=1)
    out = side_by_side(a, b, "off", "lossless: 34/34 blocks fused")
    assert (out.dtype, out.device.type, out.shape[0]) == (torch.float32, "cpu", batch)
    strip = out.shape[1] - height
    assert strip > 0
    assert torch.equal(out[:, strip:, :width], a)
    assert torch.equal(out[:, strip:, -width:], b)
    assert out.shape[2] > 2 * width


def test_each_label_is_written_above_its_own_picture() -> None:
    a, width = picture(1, 40, 200, 3), 200
    plain = side_by_side(a, a, "", "")
    strip = plain.shape[1] - 40
    only_a = side_by_side(a, a, "off", "")
    only_b = side_by_side(a, a, "", "off")
    assert torch.equal(plain[:, :strip], plain[:, :1, :1].expand(-1, strip, plain.shape[2], -1))
    assert (only_a[:, :strip, :width] != plain[:, :strip, :width]).any()
    assert torch.equal(only_a[:, :, width:], plain[:, :, width:])
    assert torch.equal(only_b[:, :strip, -width:], only_a[:, :strip, :width])
    assert torch.equal(only_b[:, :, :-width], plain[:, :, :-width])


def test_a_long_label_wraps_instead_of_being_cut() -> None:
    a = picture(1, 40, 120, 3)
    short, long = side_by_side(a, a, "off", "off"), side_by_side(a, a, "off", "i " * 150)
    assert long.shape[1] > short.shape[1]
    strip = long.shape[1] - 40
    assert torch.equal(long[:, strip:, :120], a)
    background = long[0, 0, 0, 0]
    assert (long[:, :strip, 128 + 114 :] == background).all(), "text ran past the right margin"


def test_one_picture_is_repeated_against_a_batch() -> None:
    one, many = picture(1, 24, 32, 3), picture(2, 24, 32, 3, seed=1)
    out = side_by_side(one, many, "a", "b")
    strip = out.shape[1] - 24
    assert torch.equal(out[:, strip:, :32], one.expand(2, -1, -1, -1))
    assert torch.equal(out[:, strip:, -32:], many)


def test_alpha_is_dropped_and_other_floats_become_float32() -> None:
    a = picture(1, 24, 32, 4).to(torch.bfloat16)
    out = side_by_side(a, a, "a", "b")
    strip = out.shape[1] - 24
    assert torch.equal(out[:, strip:, :32], a[..., :3].float())


def test_pictures_of_two_sizes_are_refused() -> None:
    a, b = picture(1, 24, 32, 3), picture(1, 24, 33, 3)
    for call in (lambda: side_by_side(a, b, "a", "b"), lambda: difference(a, b)):
        with pytest.raises(ValueError, match="A 32 x 24 and B 33 x 24"):
            call()


@pytest.mark.parametrize(
    ("largest", "gain"),
    [(1.0, 1), (0.75, 1), (0.5, 2), (0.25, 4), (0.26, 2), (1 / 255, 128), (2**-9, 256), (2**-20, 256), (2.0, 1)],
)
def test_gain_is_the_power_of_two_that_fills_the_range(largest: float, gain: int) -> None:
    a = torch.zeros(1, 16, 20, 3)
    b = a.clone()
    b[0, 2, 3, 1] = largest
    b[0, 5, 6, 0] = largest / 4
    out, found = difference(a, b)
    assert found == gain
    strip = out.shape[1] - 16
    assert torch.equal(out[:, strip:], ((a - b).abs() * gain).clamp(max=1.0))
    assert torch.equal(difference(b, a)[0], out)


def test_identical_pictures_are_black_and_say_so() -> None:
    a = picture(2, 16, 200, 3)
    out, gain = difference(a, a.clone())
    assert gain == 1
    strip = out.shape[1] - 16
    assert (out[:, strip:] == 0).all()
    nudged = a.clone()
    nudged[0, 0, 0, 0] += 0.01
    other, _ = difference(a, nudged)
    assert (out[:, :strip] != other[:, :strip]).any(), "the strip must not read the same for differing pictures"


def test_pictures_that_only_float64_tells_apart_are_not_called_identical() -> None:
    black = torch.zeros(1, 8, 300, 3, dtype=torch.float64)
    same, gain = difference(black, black)
    other, most = difference(black, black + 1e-200)
    assert (gain, most) == (1, 256)
    assert (same != other).any()


def test_one_gain_for_the_whole_batch() -> None:
    a = torch.zeros(2, 16, 20, 3)
    b = a.clone()
    b[0] += 0.1
    b[1] += 0.01
    out, gain = difference(a, b)
    assert (gain, out.shape[0]) == (8, 2)
    assert out[1, -1, -1, 0] == pytest.approx(0.08)


def test_values_that_are_not_finite_are_white_and_leave_the_gain_alone() -> None:
    a = torch.zeros(1, 16, 20, 3)
    b = torch.full_like(a, 0.1)
    b[0, 0, 0, 0] = float("nan")
    b[0, 0, 1, 0] = float("inf")
    out, gain = difference(a, b)
    strip = out.shape[1] - 16
    assert gain == 8
    assert out[0, strip, 0, 0] == out[0, strip, 1, 0] == 1.0
    assert out[0, strip, 2, 0] == pytest.approx(0.8)
    assert out.isfinite().all()
