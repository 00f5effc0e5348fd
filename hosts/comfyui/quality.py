"""Sets the fusion quality of a MODEL: a clone with a wrapper that mounts kernels for the length of one model call.

Another one spares each step the copy of the text features (`text_features.py`), which is exact at either quality. The
keyed APPLY_MODEL wrapper is core's own way to change a model for a call (its torch.compile helper uses it too):
nothing stays on the shared modules, the model that runs is found from the call itself, and clones, LoRA and
multi-GPU copies are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import nn

from ...fusion.chains import BLOCK_CHAINS, ROPE, SILU_MUL
from ...fusion.fusion import OFF, QUALITIES, Fusion
from ...fusion.structure import NORMS
from .blocks import HOST
from .text_features import TextFeaturesOnDevice

KEY = "ideogram4_fusion"

# Of core's own wrapper (`comfy_api/torch_helpers/torch_compile.py`), whose module would import all of comfy_api.
_COMPILE_KEY = "torch.compile"
_COMPILED = "torch.compile is on this model, and traces the stock chains"

_BLOCK = r"diffusion_model\.layers\.\d+"
_PATCHED = {
    rf"{_BLOCK}(\.({'|'.join(NORMS)}))?(\.forward)?": BLOCK_CHAINS,
    rf"{_BLOCK}\.feed_forward(\.forward)?": (SILU_MUL,),
    rf"{_BLOCK}\.attention(\.\w+)?(\.forward)?": (ROPE,),
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
        root = _root(executor.class_obj)
        revision = self.fusion.ledger.revision
        with self.fusion.mounted(root):
            out = executor(*args, **kwargs)
        if self.tell is not None and self.fusion.ledger.revision != revision:
            self.tell(self.fusion.status(root))
        return out


def set_quality(
    model: ModelPatcher, quality: str, tell: Callable[[str], None] | None = None
) -> tuple[ModelPatcher, str]:
    """A MODEL at the given quality, and its status in one line.

    Args:
        model: any MODEL; an earlier quality on it is replaced.
        quality: `off`, `lossless` or `high`. `off` returns `model` itself if it carries no fusion.
        tell: called with a new status line when sampling has changed it.

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
    if quality == OFF:
        return fused, "off: stock"
    root = _root(model.model)
    fusion = Fusion(quality, HOST, torch.device(model.load_device), model.model.get_dtype_inference())
    fusion.self_test(root)
    fused.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, FusionWrapper(fusion, tell))
    fused.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, TextFeaturesOnDevice(KEY))
    return fused, status(fused)


def fusion_of(model: ModelPatcher) -> Fusion | None:
    """The Fusion that a MODEL carries, or None."""
    wrappers = model.get_wrappers(WrappersMP.APPLY_MODEL, KEY)
    return wrappers[-1].fusion if wrappers else None


def status(model: ModelPatcher) -> str:
    """What is mounted on a MODEL, in one line, as of its last forward."""
    fusion = fusion_of(model)
    if fusion is None:
        return "off: stock"
    if _compiled(model):
        return f"stock: {_COMPILED}"
    return fusion.status(_root(model.model), _foreign(model), _object_patches(model))


def unfused_reason(model: ModelPatcher) -> str | None:
    """Why a MODEL that carries a Fusion runs stock all the same, or None where a kernel is mounted."""
    fusion = fusion_of(model)
    if fusion is None:
        return "its fusion quality is off"
    return _COMPILED if _compiled(model) else fusion.unfused_reason(_root(model.model))


def _compiled(model: ModelPatcher) -> bool:
    return bool(model.get_wrappers(WrappersMP.APPLY_MODEL, _COMPILE_KEY))


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
