"""What fusion must know of ComfyUI's Ideogram 4: how a norm's weight is opened. Its attention keeps its own rope."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import comfy.ops
import torch
from torch import nn

from ...fusion.host import Host


@contextmanager
def _norm_weight(norm: nn.RMSNorm, x: torch.Tensor) -> Iterator[torch.Tensor]:
    # The cast context is where core applies LoRA, offloading and paging; the bare parameter may lack all three.
    with comfy.ops.CastBiasWeightContext(norm, x, offloadable=True) as (weight, _):
        yield weight


HOST = Host("ComfyUI", _norm_weight)
