"""What fusion must know of diffusers' Ideogram 4: its plain parameters, and its attention with the rope left open.

Attention is written after diffusers' `Ideogram4AttnProcessor` (`transformer_ideogram4.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_ideogram4 import Ideogram4AttnProcessor
from torch import nn

from ...fusion.chains import ROPE, Chain
from ...fusion.host import AttentionForm, Host, Spare


def _norm_weight(norm: nn.RMSNorm, x: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
    return nullcontext(norm.weight)


def _attention_forward(
    attention: Any,
    rope: Callable[..., torch.Tensor],
    spare: Spare,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    assert image_rotary_emb is not None
    heads = (attention.num_heads, attention.head_dim)
    query = attention.norm_q(attention.to_q(hidden_states).unflatten(-1, heads))
    key = attention.norm_k(attention.to_k(hidden_states).unflatten(-1, heads))
    value = attention.to_v(hidden_states).unflatten(-1, heads)
    out = dispatch_attention_fn(
        rope(query, *image_rotary_emb),
        rope(key, *image_rotary_emb),
        value,
        attn_mask=attention_mask,
        backend=attention.processor._attention_backend,
        parallel_config=attention.processor._parallel_config,
    )
    projected: torch.Tensor = attention.to_out[0](out.flatten(2, 3))
    return projected


def _stands_for(attention: nn.Module) -> bool:
    return type(getattr(attention, "processor", None)) is Ideogram4AttnProcessor


def _rope() -> Chain:
    from ...kernels import rotate_half_rope
    from ...kernels.launch import Prepared

    return Chain(ROPE, rotate_half_rope.rotate_half_rope_reference, Prepared(rotate_half_rope.prepare))


HOST = Host("diffusers", _norm_weight, AttentionForm(_attention_forward, _stands_for, _rope))
