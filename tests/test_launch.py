"""Kernels prepared once for each form of their arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ideogram4_fusion.kernels import launch, silu_mul
from ideogram4_fusion.kernels.errors import KernelDeclined
from ideogram4_fusion.kernels.launch import Prepared

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def counting() -> tuple[Prepared, list[tuple[torch.Size, ...]]]:
    """A Prepared that notes what it was prepared for."""
    seen: list[tuple[torch.Size, ...]] = []

    def prepare(*args: Any) -> Any:
        seen.append(tuple(a.shape for a in args if isinstance(a, torch.Tensor)))
        return silu_mul.prepare(*args)

    return Prepared(prepare), seen


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def test_prepared_once_for_a_form() -> None:
    prepared, seen = counting()
    for seed in range(3):
        args = random(3, 130, seed=seed), random(3, 130, seed=seed + 7)
        assert torch.equal(prepared(*args), silu_mul.silu_mul_reference(*args))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: (random(4, 130), random(4, 130)), id="shape"),
        # Triton compiles loads of 16 bytes for pointers on 16 bytes: taken for others they would fault.
        pytest.param(lambda: (random(391)[1:].view(3, 130), random(3, 130)), id="alignment"),
        pytest.param(lambda: (random(3, 130), random(3, 130), torch.bfloat16), id="another argument"),
    ],
)
def test_another_form_is_prepared_anew(other: Any) -> None:
    prepared, seen = counting()
    prepared(random(3, 130), random(3, 130))
    args = other()
    assert torch.equal(prepared(*args), silu_mul.silu_mul_reference(*args))
    assert len(seen) == 2


def test_what_was_not_checked_is_never_run() -> None:
    """Same shape and dtype, other strides: the kernel would read memory as if it lay close."""
    prepared, _ = counting()
    prepared(random(3, 130), random(3, 130))
    with pytest.raises(KernelDeclined, match="not contiguous"):
        prepared(random(130, 3).t(), random(3, 130))


def test_forms_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MAX_FORMS", 2)
    prepared, seen = counting()
    for rows in (1, 2, 3, 3, 1):
        prepared(random(rows, 8), random(rows, 8))
    assert [shapes[0][0] for shapes in seen] == [1, 2, 3, 1]
