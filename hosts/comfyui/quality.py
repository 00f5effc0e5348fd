"""Sets the fusion quality of a MODEL: a clone with a wrapper that mounts kernels for the length of one model call.

Another one spares each step the copy of the text features (`text_features.py`), which is exact at either quality. The
keyed APPLY_MODEL wrapper is core's own way to change a model for a call (its torch.compile helper uses it too):
nothing stays on the shared modules, the model that runs is found from the call itself, and clones, LoRA and
multi-GPU copies are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import nn

from ...fusion.chains import BLOCK_CHAINS, ROPE, SILU_MUL
from ...fusion.exchange import is_meddled_with, is_patched
from ...fusion.fusion import HIGH, OFF, QUALITIES, Fusion
from ...fusion.pieces import ALL, STOCK, Pieces
from ...fusion.structure import NORMS
from .attention import OVERRIDE, CudnnAttention, attention_of, is_foreign, set_attention
from .blocks import HOST
from .compiled import KEY as COMPILE_KEY
from .compiled import compiled
from .text_features import TextFeaturesOnDevice

KEY = "ideogram4_fusion"

_OPTIONS = 5  # where core hands transformer_options to an APPLY_MODEL wrapper
_COMPILED = "torch.compile is on this model, and traces the stock chains"

_BLOCK = r"diffusion_model\.layers\.\d+"
_PATCHED = {
    rf"{_BLOCK}(\.({'|'.join(NORMS)}))?(\.forward)?": BLOCK_CHAINS,
    rf"{_BLOCK}\.feed_forward(\.forward)?": (SILU_MUL,),
    # The attention that newer cores are told to take stands beside the modules that are written out.
    rf"{_BLOCK}\.attention(\.(?!comfy_attention)\w+)?(\.forward)?": (ROPE,),
}


class FusionWrapper:
    """Mounts a Fusion for one call of the model. Shared by all clones; it holds no model.

    Args:
        fusion: what to mount.
        tell: called with the new status whenever a forward has changed it.
    """

    def __init__(self, fusion: Fusion, tell: Callable[[str], None] | None = None) -> None:
        self.fusion = fusion
        self.tell = tell

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        options: dict[str, Any] = kwargs.get("transformer_options") or (args[_OPTIONS] if len(args) > _OPTIONS else {})
        model = executor.class_obj.diffusion_model
        if compiled(options) or hasattr(model, "_orig_mod"):
            # Sites of ours would be guarded on and compiled anew, and what is traced is the stock model in any case.
            return executor(*args, **kwargs)
        override = options.get(OVERRIDE)
        before = self._state(override)
        out = self.fusion.run(model, lambda: executor(*args, **kwargs), lambda: not _watched(model, options))
        if self.tell is not None and self._state(override) != before:
            line = self.fusion.status(model, _foreign_attention(override))
            self.tell(_with_attention(line, self.fusion, override))
        return out

    def _state(self, override: Any) -> tuple[object, ...]:
        return self.fusion.ledger.revision, override.status if isinstance(override, CudnnAttention) else None


def set_quality(
    model: ModelPatcher, quality: str, tell: Callable[[str], None] | None = None, pieces: Pieces = ALL
) -> tuple[ModelPatcher, str]:
    """A MODEL at the given quality, and its status in one line.

    Args:
        model: any MODEL; an earlier quality on it is replaced.
        quality: `off`, `lossless` or `high`. `off` returns `model` itself if it carries no fusion.
        tell: called with a new status line when sampling has changed it.
        pieces: of `high`.

    Raises:
        ValueError: no such quality.
    """
    if quality not in QUALITIES:
        raise ValueError(f"fusion quality {quality!r} is none of {', '.join(QUALITIES)}")
    if quality == OFF and fusion_of(model) is None:
        return model, "off: stock"
    fused = model.clone()
    for kind in (WrappersMP.APPLY_MODEL, WrappersMP.SAMPLER_SAMPLE):
        fused.remove_wrappers_with_key(kind, KEY)
    set_attention(fused, pieces.attention if quality == HIGH else STOCK)
    if quality == OFF:
        return fused, "off: stock"
    root = _root(model.model)
    device, dtype = torch.device(model.load_device), model.model.get_dtype_inference()
    fusion = Fusion(quality, HOST, device, dtype, pieces=pieces)
    fusion.self_test(root)
    fused.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, FusionWrapper(fusion, tell))
    fused.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, TextFeaturesOnDevice(KEY))
    return fused, status(fused)


def fusion_of(model: ModelPatcher) -> Fusion | None:
    """The Fusion that a MODEL carries, or None."""
    wrappers = model.get_wrappers(WrappersMP.APPLY_MODEL, KEY)
    return wrappers[-1].fusion if wrappers else None


def quality_of(model: ModelPatcher) -> str:
    """The quality that was set on a MODEL."""
    fusion = fusion_of(model)
    return OFF if fusion is None else fusion.quality


def pieces_of(model: ModelPatcher) -> Pieces:
    """The pieces of `high` that were chosen on a MODEL, whatever its quality; all where it carries no fusion."""
    fusion = fusion_of(model)
    return ALL if fusion is None else fusion.chosen


def status(model: ModelPatcher, unconditional: ModelPatcher | None = None) -> str:
    """What is mounted on a MODEL, in one line, as of its last forward.

    Args:
        model: the MODEL.
        unconditional: asks for what `model` mounts on this one, which a guider of two models runs with its options.
    """
    fusion = fusion_of(model)
    if fusion is None:
        return "off: stock"
    if _compiled(model):
        return f"stock: {_COMPILED}"
    override = model.model_options.get("transformer_options", {}).get(OVERRIDE)
    mounted_on = unconditional or model
    foreign = {**_foreign(mounted_on), **_foreign_attention(override)}
    line = fusion.status(_root(mounted_on.model), foreign, _object_patches(mounted_on))
    return _with_attention(line, fusion, override)


def _with_attention(line: str, fusion: Fusion, override: Any) -> str:
    if isinstance(override, CudnnAttention):
        return f"{line}; attention: {override.status}"
    if fusion.pieces.attention == STOCK:
        return line
    return f"{line}; attention: {'ComfyUI' if override is None else 'another node'}'s"


def _foreign_attention(override: Any) -> dict[str, str]:
    """The chain inside attention, where another node has taken attention over."""
    return {ROPE: "another node's attention is around it"} if is_foreign(override) else {}


def _watched(model: nn.Module, transformer_options: Mapping[str, Any]) -> bool:
    """Whether others look on, who would see a forward that is run twice as two steps."""
    wrappers = transformer_options.get("wrappers", {})
    override = transformer_options.get(OVERRIDE)
    return (
        any(wrappers.get(kind, {}).keys() - {KEY} for kind in (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL))
        or is_foreign(override)
        # Our own forwards are off again by the time that this is asked.
        or any(is_meddled_with(module) or is_patched(module, "_forward") for module in model.modules())
    )


def unfused_reason(model: ModelPatcher) -> str | None:
    """Why a MODEL that carries a Fusion runs stock all the same, or None where a kernel is mounted."""
    fusion = fusion_of(model)
    if fusion is None:
        return "its fusion quality is off"
    attention = attention_of(model)
    if attention is not None and attention.used:
        return None
    return _COMPILED if _compiled(model) else fusion.unfused_reason(_root(model.model))


def _compiled(model: ModelPatcher) -> bool:
    return bool(model.get_wrappers(WrappersMP.APPLY_MODEL, COMPILE_KEY))


def _root(base_model: Any) -> nn.Module:
    root: nn.Module = base_model.diffusion_model
    # torch.compile's wrapper stands around the module for the call; the blocks are the same.
    return getattr(root, "_orig_mod", root)


def _foreign(model: ModelPatcher) -> dict[str, str]:
    """Chains whose modules another node has patched; core puts such patches on the module only when it loads it."""
    return {
        chain: "another node patched it"
        for key in model.object_patches
        for pattern, chains in _PATCHED.items()
        if re.fullmatch(pattern, key)
        for chain in chains
    }


def _object_patches(model: ModelPatcher) -> set[int]:
    """The ids of what core has put on the module for this MODEL or another clone, and takes off with it."""
    loaded = (known.model for known in comfy.model_management.current_loaded_models)
    clones = (patcher for patcher in loaded if patcher is not None and patcher.model is model.model)
    return {id(patch) for patcher in (model, *clones) for patch in patcher.object_patches.values()}
