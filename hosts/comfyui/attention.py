"""cuDNN's attention for one MODEL, through core's own hook for that (`optimized_attention_override`)."""

from __future__ import annotations

import logging
from typing import Any

import comfy.ldm.modules.attention
import torch
from comfy.model_patcher import ModelPatcher

from ...fusion.pieces import CUDNN, STOCK
from ...kernels.attention import cudnn_attention, cudnn_is_faster
from ...kernels.availability import is_nvidia
from ...kernels.errors import KernelDeclined
from ...kernels.memory import is_out_of_memory
from .compiled import compiled

log = logging.getLogger("ideogram4_fusion")

OVERRIDE = "optimized_attention_override"

_PREFERENCE = "comfy_attention"  # beside a block's attention, in cores newer than 0.33
_ELSEWHERE = "the model is not on an NVIDIA GPU"

# What core hands on beside queries, keys, values, heads and mask without asking for other numbers.
_NEUTRAL = {"skip_reshape", "transformer_options", "_inside_attn_wrapper"}


class CudnnAttention:
    """Stands in for core's attention where cuDNN's is chosen; all else it leaves to core.

    Args:
        choice: `auto` or `cudnn`.

    Attributes:
        declined: why it left calls to core, each reason once.
        used: whether it takes calls: it took one, and has not failed since.
    """

    def __init__(self, choice: str) -> None:
        self.choice = choice
        self.declined: dict[str, None] = {}
        self.used = False
        self._failed: str | None = None

    def __call__(
        self, stock: Any, q: Any, k: Any, v: Any, heads: int, mask: Any = None, *args: Any, **named: Any
    ) -> Any:
        if torch.compiler.is_compiling() or compiled(named.get("transformer_options") or {}):
            traced: torch.Tensor = stock(q, k, v, heads, mask, *args, **named)
            return traced
        # Threads of several GPUs share this object: what is decided for one call stays in it.
        declined = self._failed or self._decline(stock, q, mask, args, named)
        if declined is None:
            try:
                out = cudnn_attention(q, k, v)
            except torch.OutOfMemoryError:
                raise  # core frees what it can, and says what to do
            except KernelDeclined as refusal:
                declined = str(refusal)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    declined = "cuDNN found too little memory"
                else:
                    declined = self._failed = f"cuDNN fails here: {' '.join(str(error).split())[:80]}"
                    self.used = False
                    log.warning("Ideogram 4 fusion: attention stays ComfyUI's: %s", declined)
            else:
                self.used = True
                return out.transpose(1, 2).flatten(2)
        self.declined[declined] = None
        return stock(q, k, v, heads, mask, *args, **named)

    def _decline(
        self, stock: Any, q: torch.Tensor, mask: Any, args: tuple[Any, ...], named: dict[str, Any]
    ) -> str | None:
        if mask is not None:
            return "it has a mask: core chooses"
        if args or not named.get("skip_reshape") or any(named[name] for name in named.keys() - _NEUTRAL):
            return "it is called otherwise than by Ideogram 4"
        if not is_nvidia(q.device):
            return _ELSEWHERE
        if self.choice == CUDNN:
            return None
        if stock is not core_default():
            return f"{getattr(stock, '__name__', 'another one')} was chosen when ComfyUI was started"
        if not cudnn_is_faster(torch.cuda.get_device_capability(q.device), q.shape[-1]):
            return f"none was measured to be faster on this GPU for heads of {q.shape[-1]}"
        return None

    @property
    def status(self) -> str:
        """For the status line: all that it has done so far, so that calls that alternate do not change it."""
        if self._failed is not None:
            return f"ComfyUI's ({self._failed})"
        reasons = "; ".join(self.declined)
        if self.used:
            return f"cuDNN, else ComfyUI's ({reasons})" if reasons else "cuDNN"
        return f"ComfyUI's ({reasons})" if reasons else "to be chosen on the first step"


def core_default() -> Any:
    """core's attention by PyTorch, as an override is handed it."""
    attention = comfy.ldm.modules.attention.attention_pytorch
    return getattr(attention, "__wrapped__", attention)


def attention_of(model: ModelPatcher) -> CudnnAttention | None:
    """Ours on a MODEL, or None."""
    found = model.model_options.get("transformer_options", {}).get(OVERRIDE)
    return found if isinstance(found, CudnnAttention) else None


def is_foreign(override: Any) -> bool:
    """Whether an override is another pack's."""
    return not (override is None or isinstance(override, CudnnAttention))


def set_attention(model: ModelPatcher, choice: str) -> None:
    """Puts it on a MODEL, or takes it off for `stock`.

    Another pack's override stays, whatever is chosen; so does an attention that the checkpoint or a LoRA asks for,
    which newer cores leave out where there is an override.
    """
    options = model.model_options.setdefault("transformer_options", {})
    if attention_of(model) is not None:
        del options[OVERRIDE]
    if choice != STOCK and OVERRIDE not in options and not _asks_for_its_own(model):
        options[OVERRIDE] = ours = CudnnAttention(choice)
        if not is_nvidia(torch.device(model.load_device)):
            ours.declined[_ELSEWHERE] = None  # known before the first step


def _asks_for_its_own(model: ModelPatcher) -> bool:
    preferences = [getattr(module, _PREFERENCE, None) for module in model.model.modules()]
    functions = [getattr(preference, "function", None) for preference in preferences]
    # A LoRA's or another node's: core puts it on the module only when it loads the model.
    for name, patch in model.object_patches.items():
        if name.endswith(f".{_PREFERENCE}"):
            functions.append(getattr(patch, "function", None))
        elif name.endswith(f".{_PREFERENCE}.function"):
            functions.append(patch)
    return any(function is not None for function in functions)
