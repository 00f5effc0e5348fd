"""Blocks whose six Linears all quantise their input, as ComfyUI's fp8 ones do, with one fused projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from ideogram4_fusion.fusion.chains import Chain, load_chains
from ideogram4_fusion.fusion.emission import run_linear
from ideogram4_fusion.fusion.fusion import Fusion
from ideogram4_fusion.fusion.host import AttentionForm, Host
from ideogram4_fusion.kernels.quantise import quantise_reference
from ideogram4_fusion.tests.quantising import EMISSION, QuantisingLinear
from ideogram4_fusion.tests.stack import ADALN, DEVICE, HIDDEN, INNER, Stack, make_stack
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Of one head, its rotation a product with the given table; `gaps` hands `o` a tensor that is not contiguous."""

    gaps = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = (
            QuantisingLinear(HIDDEN, 3 * HIDDEN, bias=False),
            QuantisingLinear(HIDDEN, HIDDEN, bias=False),
        )

    def forward(self, x: torch.Tensor, mask: Any, rope: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = rotate(q, k, rope)
        out: torch.Tensor = self.o(attend(self, q, k, v))
        return out


def rotate(q: torch.Tensor, k: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q * rope, k * rope


def attend(attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).contiguous().transpose(1, 2) if attention.gaps else out


def written_out(attention: Any, rope: Any, spare: Any, x: Any, mask: Any, table: torch.Tensor) -> torch.Tensor:
    q, k, v = run_linear(attention.qkv, x).chunk(3, dim=-1)
    q, k = rope(q, k, table)
    return run_linear(attention.o, spare(attention.o, attend(attention, q, k, v)))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (QuantisingLinear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.w2 = QuantisingLinear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """What `adaln_modulation` is given is `adaln_input` itself; a strange block's may differ."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
            setattr(self, name, nn.RMSNorm(HIDDEN, eps=1e-5))
        self.adaln_modulation = QuantisingLinear(ADALN, 4 * HIDDEN, bias=False)

    def modulation(self, adaln_input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.adaln_modulation(adaln_input)
        return out

    def forward(self, x: torch.Tensor, mask: Any, rope: Any, adaln_input: torch.Tensor) -> torch.Tensor:
        scale_msa, gate_msa, scale_mlp, gate_mlp = self.modulation(adaln_input).chunk(4, dim=-1)
        h = self.attention(self.attention_norm1(x) * (1.0 + scale_msa), mask, rope)
        x = x + torch.tanh(gate_msa) * self.attention_norm2(h)
        h = self.feed_forward(self.ffn_norm1(x) * (1.0 + scale_mlp))
        return x + torch.tanh(gate_mlp) * self.ffn_norm2(h)


def make_fp8_stack(block: type[nn.Module] = Block) -> Stack:
    return make_stack(block=block)


def make_fp8_inputs(tokens: int = 37) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(DEVICE)

    return random(1, tokens, HIDDEN), None, random(1, tokens, HIDDEN), random(1, 1, ADALN)


def make_fp8_fusion(**kernels: Callable[..., Any]) -> Fusion:
    """Eager forms as kernels but for those named, `-` and `+` of a chain's name written as `_`."""
    chains = {**load_chains(), "rope": Chain("rope", rotate, rotate)}
    chains["fp8 input"] = Chain("fp8 input", quantise_reference, quantise_reference)
    replaced = {
        name: dataclasses.replace(
            chain,
            fused=kernels.get(name.translate(str.maketrans("-+ ", "___")), chain.eager),
            inexact=lambda device: None,
        )
        for name, chain in chains.items()
    }
    form = AttentionForm(
        written_out,
        lambda attention: isinstance(attention, Attention),
        lambda: chains["rope"],
        first_linear="qkv",
        last_linear="o",
    )
    host = Host("test", lambda norm, x: nullcontext(norm.weight), form, EMISSION)
    return Fusion("lossless", host, torch.device(DEVICE), chains=replaced)
