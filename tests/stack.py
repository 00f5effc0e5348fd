"""A stack of diffusers' own Ideogram 4 blocks, small and random, for tests of fusion without a whole pipeline."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_ideogram4 import Ideogram4TransformerBlock
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, HEADS, INNER, ADALN = 128, 4, 256, 32


class Stack(nn.Module):
    """Blocks one after another, as the transformer runs them."""

    def __init__(self, layers: int = 3, block: type[nn.Module] = Ideogram4TransformerBlock) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block(HIDDEN, INNER, HEADS, 1e-5, ADALN) for _ in range(layers))

    def forward(self, x: torch.Tensor, mask: Any, rope: Any, adaln_input: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask, rope, adaln_input)
        return x


def with_torch_norms(root: nn.Module) -> nn.Module:
    """Exchanges diffusers' RMSNorm for torch's, as the headless host does."""
    for module in list(root.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RMSNorm):
                setattr(module, name, nn.RMSNorm(child.dim[0], eps=child.eps))
    return root


def make_stack(layers: int = 3, block: type[nn.Module] = Ideogram4TransformerBlock, seed: int = 0) -> Stack:
    """A frozen bf16 stack with weights that keep the scale of their input."""
    torch.manual_seed(seed)
    stack = with_torch_norms(Stack(layers, block)).requires_grad_(False)
    for name, parameter in stack.named_parameters():
        if parameter.ndim == 1:
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return stack.to(DEVICE, torch.bfloat16).eval()


def make_inputs(batch: int = 1, tokens: int = 37, seed: int = 1) -> tuple[Any, ...]:
    """Arguments of `Stack.forward`."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(DEVICE)

    angle = torch.rand(batch, tokens, HIDDEN // HEADS // 2, generator=generator).to(DEVICE) * 6.28
    angle = torch.cat((angle, angle), dim=-1)
    rope = (angle.cos().bfloat16(), angle.sin().bfloat16())
    mask = torch.ones(batch, 1, tokens, tokens, dtype=torch.bool, device=DEVICE)
    return random(batch, tokens, HIDDEN), mask, rope, random(batch, 1, ADALN)
