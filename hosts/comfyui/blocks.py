"""What fusion must know of ComfyUI's Ideogram 4: how a norm's weight is opened, and its attention written out.

Attention is written after core's `Ideogram4Attention.forward` (`comfy/ldm/ideogram4/model.py`) since its change to
comfy-kitchen's `rms_rope_split_half`; the earlier one keeps its own rope.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import comfy.model_management
import comfy.ops
import comfy.quant_ops
import torch
from torch import nn

from ...fusion.chains import ROPE, Chain
from ...fusion.emission import Emitted, run_linear
from ...fusion.host import AttentionForm, Host, Spare
from .attention import OVERRIDE, is_foreign
from .fp8 import EMISSION

Rope = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class _NormWeight(comfy.ops.CastBiasWeightContext):
    """core's cast context of an RMSNorm, giving the weight alone.

    The cast is where core applies LoRA, offloading and paging; the bare parameter may lack all three. A subclass, since
    a generator around it costs twice the time, six times a block.
    """

    def __enter__(self) -> torch.Tensor:
        weight, _ = super().__enter__()
        return weight


def _norm_weight(norm: nn.RMSNorm, x: torch.Tensor) -> _NormWeight:
    return _NormWeight(norm, x, offloadable=True)


def _attention_forward(
    attention: Any,
    rope: Rope,
    spare: Spare,
    x: torch.Tensor | Emitted,
    attn_mask: torch.Tensor | None,
    freqs_cis: torch.Tensor,
    transformer_options: dict[str, Any] | None = None,
) -> torch.Tensor:
    qkv = run_linear(attention.qkv, x).unflatten(-1, (3, attention.num_heads, attention.head_dim))
    q, k, v = qkv.unbind(dim=2)
    with _norm_weight(attention.norm_q, q) as q_weight, _norm_weight(attention.norm_k, k) as k_weight:
        # One epsilon for both, as core passes it.
        q, k = rope(q, k, q_weight, k_weight, freqs_cis, attention.norm_q.eps)
    # By their names in core's module, so that whatever replaced them there is heeded. Newer cores put q, k
    # and v into containers, and attention has a preference of its own.
    core = sys.modules[type(attention).__module__]
    contain = getattr(core, "AttentionTensorContainer", _as_it_is)
    preference = {"preferred_attention": attention.comfy_attention} if hasattr(attention, "comfy_attention") else {}
    heads = [contain(part.transpose(1, 2)) for part in (q, k, v)]
    del qkv, q, k, v  # a container frees them as soon as they are taken out
    out = core.optimized_attention_masked(
        *heads,
        attention.num_heads,
        attn_mask,
        skip_reshape=True,
        transformer_options={} if transformer_options is None else transformer_options,
        **preference,
    )
    return run_linear(attention.o, spare(attention.o, out))


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _stands_for(attention: nn.Module) -> bool:
    return hasattr(sys.modules.get(type(attention).__module__), "_split_half_rope_matrix")


def _takes(arguments: Mapping[str, Any]) -> bool:
    if comfy.model_management.in_training:
        return False  # core then norms and rotates in operations that have gradients
    return not is_foreign((arguments.get("transformer_options") or {}).get(OVERRIDE))


def _rests_on() -> tuple[object, ...]:
    kitchen = getattr(comfy.quant_ops, "ck", None)
    return (getattr(kitchen, "rms_rope_split_half", None),)


def _rope() -> Chain:
    from ...kernels import rms_norm_rope
    from ...kernels.launch import Prepared

    def stock(
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        freqs: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotated: tuple[torch.Tensor, torch.Tensor] = comfy.quant_ops.ck.rms_rope_split_half(
            q, k, freqs, q_weight, k_weight, eps
        )
        return rotated

    return Chain(ROPE, stock, Prepared(rms_norm_rope.prepare), rms_norm_rope.inexact_rotation)


_ATTENTION = AttentionForm(_attention_forward, _stands_for, _rope, _takes, first_linear="qkv", last_linear="o")
HOST = Host("ComfyUI", _norm_weight, _ATTENTION, EMISSION, _rests_on)
