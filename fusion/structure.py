"""Finds the blocks of an Ideogram 4 transformer by their parts, whoever wrote the class, and what forbids fusing them.

Source of the parts and of their names: the reference model, kept by ComfyUI (`comfy/ldm/ideogram4/model.py`) and
diffusers (`transformer_ideogram4.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..kernels.rows import decline_hidden_size
from .exchange import is_hooked, is_meddled_with

NORMS = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
PARTS = ("attention", "feed_forward", *NORMS, "adaln_modulation")
ADALN_INPUT = "adaln_input"


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one call of a block: what the chains need, and what is handed on to attention by name."""

    x: torch.Tensor
    adaln_input: torch.Tensor
    attention: dict[str, Any]


@dataclass(frozen=True)
class BlockSignature:
    """Parameters of a block's forward without `self`, the hidden states first: their names and defaults."""

    names: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockCall:
        """Sorts the arguments of a call.

        Raises:
            KeyError: hidden states or adaln_input are missing.
            TypeError: there are more arguments than parameters.
        """
        if len(args) > len(self.names):
            raise TypeError(f"forward takes {len(self.names)} arguments, {len(args)} were given")
        given = {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}
        x, adaln_input = given.pop(self.names[0]), given.pop(ADALN_INPUT)
        return BlockCall(x, adaln_input, given)


@dataclass(frozen=True)
class Structure:
    """The blocks to fuse, or the reason why none is."""

    blocks: tuple[nn.Module, ...] = ()
    signature: BlockSignature = BlockSignature(())
    declined: str | None = None


def is_block(module: nn.Module) -> bool:
    """Whether a module has every part of an Ideogram 4 block."""
    return all(isinstance(getattr(module, part, None), nn.Module) for part in PARTS)


def inspect_model(root: nn.Module) -> Structure:
    """Finds every block below `root`. One block that cannot be fused declines the whole model, with the reason."""
    stacks = [m for m in root.modules() if isinstance(m, nn.ModuleList) and any(is_block(b) for b in m)]
    if not stacks:
        return Structure(declined=f"{type(root).__name__} has no Ideogram 4 blocks")
    blocks = tuple(block for stack in stacks for block in stack)
    for number, block in enumerate(blocks):
        if reason := _decline_block(block):
            return Structure(declined=f"block {number}: {reason}")
    signature = _signature(blocks[0])
    if isinstance(signature, str):
        return Structure(declined=signature)
    if any(type(b) is not type(blocks[0]) or type(b.attention) is not type(blocks[0].attention) for b in blocks):
        return Structure(declined="the blocks are of different classes")
    return Structure(blocks, signature)


def norms_hooked(block: nn.Module, passed_over: Container[int] = ()) -> bool:
    """Whether something patched or watches one of the block's norms, whose forward the kernels skip.

    Args:
        block: any.
        passed_over: ids of forwards that are not to count.
    """
    parts = block._modules
    return any(
        is_meddled_with(norm) and (is_hooked(norm) or id(norm.__dict__["forward"]) not in passed_over)
        for norm in (parts[name] for name in NORMS)
        if norm is not None
    )


def _decline_block(block: nn.Module) -> str | None:
    for part in PARTS:
        if not isinstance(getattr(block, part, None), nn.Module):
            return f"{type(block).__name__} has no {part}"
    for part in ("w1", "w2", "w3"):
        if not isinstance(getattr(block.feed_forward, part, None), nn.Module):
            return f"feed_forward has no {part}"
    sizes = set()
    for name in NORMS:
        norm = getattr(block, name)
        if not isinstance(norm, torch.nn.RMSNorm):
            return f"{name} is a {type(norm).__module__}.{type(norm).__name__}, which rounds unlike torch.nn.RMSNorm"
        if norm.weight is None or norm.weight.ndim != 1 or norm.eps is None:
            return f"{name} has no one-dimensional weight or no eps"
        if norm.weight.dtype != torch.bfloat16:
            return f"the weight of {name} is {str(norm.weight.dtype).removeprefix('torch.')}, not bfloat16"
        sizes.add(int(norm.weight.shape[0]))
    if len(sizes) != 1:
        return f"its norms have different sizes {sorted(sizes)}"
    return decline_hidden_size(sizes.pop())


def _signature(block: nn.Module) -> BlockSignature | str:
    """How to call a block and its attention, or why that is not known."""
    ours = list(inspect.signature(type(block).forward).parameters.values())[1:]
    theirs = list(inspect.signature(type(block.attention).forward).parameters.values())[1:]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in ours):
        return f"{type(block).__name__}.forward takes arguments without names"
    names = tuple(p.name for p in ours)
    if ADALN_INPUT not in names[1:]:
        return f"{type(block).__name__}.forward takes no {ADALN_INPUT}"
    known = {p.name for p in theirs}
    unknown = [n for n in names[1:] if n != ADALN_INPUT and n not in known]
    if unknown:
        return f"{type(block).__name__}.forward takes {', '.join(unknown)}, which its attention does not"
    return BlockSignature(names, {p.name: p.default for p in ours if p.default is not p.empty})
