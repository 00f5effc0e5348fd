"""Values that no checkpoint of a working model has: they come of a conversion or a download that went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from .errors import CheckpointError

# A scale is for a tensor, a row or a block of 16; norms and biases have one value a channel.
_SCALES = (".weight_scale", ".weight_scale_2", ".scale_weight", ".input_scale", ".scale_input")
_E4M3_NAN, _E4M3_SIGN = 0x7F, 0x80
_ADVICE = "A conversion has gone wrong, or the download: use the file that it was made from, or download it again."


# An end of a file that no weights have: biases of zeros may stand there, of at most 72 KiB (18,432 values in fp32).
_END, _LARGE = 1 << 17, 1 << 20


def refuse_empty_end(files: Iterable[Path]) -> None:
    """Raises for a file that ends in zeros: its space was set aside, and the download did not come to its end.

    The header of such a file is whole, and its size is right. Files below 1 MiB are not looked at.

    Raises:
        CheckpointError: its last 128 KiB are zeros.
    """
    for file in files:
        size = file.stat().st_size
        if size < _LARGE:
            continue
        with file.open("rb") as opened:
            opened.seek(size - _END)
            if not opened.read().strip(b"\0"):
                raise CheckpointError(file, "its end is empty, as of a download that was cut short", _ADVICE)


def refuse_bad_values(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises for a scale, norm or bias that would make noise or black pictures without a word.

    The large weights are not read: that would take as long as loading them.

    Args:
        file: the file to name.
        tensors: of one model; names with or without a prefix.

    Raises:
        CheckpointError: one of them is not finite, or a scale is below zero.
    """
    small: dict[tuple[bool, torch.dtype], list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        scale = name.endswith(_SCALES)
        if scale or (tensor.ndim <= 1 and tensor.is_floating_point()):
            small.setdefault((scale, tensor.dtype), []).append(tensor.flatten())
    # All of a kind at once: one by one, hundreds of them would take as long as the rest of the loading.
    if not any(_problem(torch.cat(kind), scale) for (scale, _), kind in small.items()):
        return
    for name, tensor in tensors.items():
        scale = name.endswith(_SCALES)
        problem = _problem(tensor, scale) if (scale, tensor.dtype) in small and (scale or tensor.ndim <= 1) else None
        if problem is not None:
            raise CheckpointError(
                file, f"a {'scale' if scale else 'norm or bias'} with values that are {problem}", _ADVICE, name
            )


def _problem(tensor: torch.Tensor, scale: bool) -> str | None:
    if tensor.element_size() == 1:  # block scales in e4m3, which has no infinity
        values = tensor.view(torch.uint8)
        if bool(((values & _E4M3_NAN) == _E4M3_NAN).any()):
            return "no numbers (NaN)"
        return "negative" if scale and bool((values > _E4M3_SIGN).any()) else None
    if not bool(tensor.isfinite().all()):
        return "no numbers (NaN)" if bool(tensor.isnan().any()) else "infinite"
    return "negative" if scale and bool((tensor < 0).any()) else None
