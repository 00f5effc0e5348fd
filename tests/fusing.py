"""Fusions of a test on a stack of blocks, with kernels of its choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ideogram4_fusion.fusion.chains import Chain, load_chains
from ideogram4_fusion.fusion.fusion import Fusion
from ideogram4_fusion.fusion.host import Host
from ideogram4_fusion.hosts.diffusers.blocks import HOST
from ideogram4_fusion.tests.stack import DEVICE, Stack
from torch import nn

CHAINS = ("modulate", "gate", "gate+modulate", "silu-mul", "rope")


Kernel = Callable[..., Any]


def all_chains() -> dict[str, Chain]:
    """Those of every host, and the rope of this one."""
    assert HOST.attention is not None
    return {**load_chains(), "rope": HOST.attention.rope()}


def make_fusion(kernels: Mapping[str, Kernel] | None = None, quality: str = "lossless", host: Host = HOST) -> Fusion:
    """A Fusion whose named chains have a kernel of the test's."""
    chains = all_chains()
    for name, fused in (kernels or {}).items():
        chains[name] = dataclasses.replace(chains[name], fused=fused, inexact=lambda device: None)
    return Fusion(quality, host, torch.device(DEVICE), chains=chains)


def eager_everywhere() -> dict[str, Kernel]:
    """Stands in for kernels where a test is about mounting: equal on the CPU too, whose sums have another order."""
    return {name: chain.eager for name, chain in all_chains().items()}


@torch.inference_mode()
def run(stack: Stack, fusion: Fusion | None, inputs: tuple[object, ...]) -> torch.Tensor:
    if fusion is None:
        return stack(*inputs)
    with fusion.mounted(stack):
        return stack(*inputs)


def untouched(stack: nn.Module) -> bool:
    return not any("forward" in module.__dict__ for module in stack.modules())


class Gelu(nn.Module):
    """A feed-forward of the same parts, of another function."""

    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = ffn.w1, ffn.w2, ffn.w3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.gelu(self.w1(x)) * self.w3(x))
