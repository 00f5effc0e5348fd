"""What may be compared: two IMAGE tensors brought to one batch."""

from __future__ import annotations

from torch import Tensor


def paired(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Checks two images [B, H, W, 3 or 4] (floating point, 0..1) and brings them to one batch, on the CPU.

    A batch of one is repeated against the other's (as a view). Channels are left as they are.

    Raises TypeError when an image is not floating point; ValueError when one is not [B, H, W, 3 or 4] or is empty, when
    widths or heights differ (nothing is ever resized), or when the batches differ and neither is one.
    """
    for name, image in (("A", a), ("B", b)):
        if not image.is_floating_point():
            raise TypeError(f"image {name} must be floating point in 0..1, got {image.dtype}")
        if image.ndim != 4 or image.shape[-1] not in (3, 4) or image.numel() == 0:
            raise ValueError(f"image {name} must be [batch, height, width, 3 or 4], got {list(image.shape)}")
    (height_a, width_a), (height_b, width_b) = a.shape[1:3], b.shape[1:3]
    if (height_a, width_a) != (height_b, width_b):
        raise ValueError(
            f"the images differ in size, A {width_a} x {height_a} and B {width_b} x {height_b} (width x height): "
            "only pictures of one size can be compared, none is resized"
        )
    if a.shape[0] != b.shape[0] and 1 not in (a.shape[0], b.shape[0]):
        raise ValueError(f"A has {a.shape[0]} images and B {b.shape[0]}: equal numbers, or one against many")
    batch = max(a.shape[0], b.shape[0])
    return a.detach().cpu().expand(batch, -1, -1, -1), b.detach().cpu().expand(batch, -1, -1, -1)


def eight_bit(image: Tensor) -> Tensor:
    """Values in 0..1 as the uint8 that an image file holds."""
    return (image * 255).round().clamp(0, 255).byte()
