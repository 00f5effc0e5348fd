"""Linears that quantise their input as ComfyUI's fp8 ones do, and a kernel that does it wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from ideogram4_fusion.fusion.chains import Chain, load_chains
from ideogram4_fusion.fusion.emission import FP8, Emission
from ideogram4_fusion.fusion.fusion import Fusion
from ideogram4_fusion.hosts.diffusers.blocks import HOST
from ideogram4_fusion.kernels.quantise import quantise_reference
from ideogram4_fusion.tests.stack import DEVICE, Stack, make_stack
from torch import nn
from torch.nn import functional as F


class QuantisingLinear(nn.Linear):
    """Quantises its input with scale 1, unless it is blocked, as by a LoRA."""

    blocked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x if self.blocked else quantise_reference(x)
        return F.linear(rows.to(torch.bfloat16), self.weight)


seen: list[tuple[nn.Module, int]] = []


def multiply(linear: nn.Module, rows: torch.Tensor, scale: torch.Tensor, fast: bool) -> torch.Tensor:
    """What a QuantisingLinear makes of rows that are quantised already."""
    assert isinstance(linear, QuantisingLinear) and rows.dtype == FP8 and float(scale) == 1
    seen.append((linear, rows.data_ptr()))
    return F.linear(rows.to(torch.bfloat16), linear.weight)


EMISSION = Emission(
    takes=lambda linear: isinstance(linear, QuantisingLinear) and not linear.blocked,
    multiply=multiply,
    quantise=quantise_reference,
)


def half_of_fp8(eager: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that is right in bf16 and wrong in fp8."""

    def kernel(*args: Any) -> Any:
        out = eager(*args)
        halved = [o if o.dtype != FP8 else (o.float() / 2).to(FP8) for o in (out if isinstance(out, tuple) else (out,))]
        return tuple(halved) if isinstance(out, tuple) else halved[0]

    return kernel


def quantising_stack() -> Stack:
    """Activations far beyond 448 in places, so that the clamp matters."""
    stack = make_stack()
    for layer in stack.layers:
        for name in ("w1", "w2", "w3"):
            linear = getattr(layer.feed_forward, name)
            replaced = QuantisingLinear(linear.in_features, linear.out_features, bias=False).to(DEVICE, torch.bfloat16)
            replaced.weight = nn.Parameter(linear.weight * (8 if name != "w2" else 1), requires_grad=False)
            setattr(layer.feed_forward, name, replaced)
    return stack


def make_fusion(**wrong: Callable[..., Any]) -> Fusion:
    """Eager forms stand in for the kernels: this is about who is handed what."""
    chains = {
        name: dataclasses.replace(
            chain, fused=wrong.get(name.replace("-", "_"), chain.eager), inexact=lambda device: None
        )
        for name, chain in load_chains().items()
    }
    chains["fp8 input"] = Chain("fp8 input", quantise_reference, wrong.get("quantise", quantise_reference))
    return Fusion("lossless", dataclasses.replace(HOST, emission=EMISSION), torch.device(DEVICE), chains=chains)
