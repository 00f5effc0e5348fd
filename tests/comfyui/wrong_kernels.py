"""Kernels of a test's own in place of the pack's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import ideogram4_fusion.fusion.fusion
import pytest
import torch
from ideogram4_fusion.fusion.chains import load_chains


def replace_kernel(monkeypatch: pytest.MonkeyPatch, chain: str, fused: Callable[..., torch.Tensor]) -> None:
    """Gives a chain that kernel in every Fusion that is made from now on."""
    chains = dict(load_chains())
    chains[chain] = dataclasses.replace(chains[chain], fused=fused)
    monkeypatch.setattr(ideogram4_fusion.fusion.fusion, "load_chains", lambda: chains)
