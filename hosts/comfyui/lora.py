"""A LoRA of any naming on an Ideogram 4 MODEL, through core's own adapters.

core knows its own names, ComfyUI's and kohya's of fused attention (ai-toolkit trains those). diffusers trains q, k and
v apart, which are thirds of the rows of the fused weight: core patches slices of a weight where it is given them.
Source of the names: diffusers' `transformer_ideogram4.py` and its LoRA trainer; core's map for another split model
(`z_image_to_diffusers` in `comfy/utils.py`) is of the same kind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.utils
from comfy.model_patcher import ModelPatcher
from comfy.weight_adapter.lora import LoRAAdapter

Target = str | tuple[str, tuple[int, int, int]]

_BLOCKS = "diffusion_model.layers."
_FUSED = ".attention.qkv.weight"
_PREFIXES = ("", "transformer.", "conditional_transformer.", "diffusion_model.", "base_model.model.")
_FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
_NAMED_AT_MOST = 3


class LoraError(ValueError):
    """A file that cannot be put on the model, in one sentence."""


def apply_lora(model: ModelPatcher, path: str | os.PathLike[str], strength: float) -> tuple[ModelPatcher, str]:
    """A clone of `model` with the LoRA on it, and a line that says how much of the file it took.

    Args:
        model: an Ideogram 4 MODEL; at any fusion quality, which goes on holding.
        path: the LoRA's file: of diffusers, ai-toolkit, kohya or ComfyUI; LoKr, LoHa and whatever else core has an
            adapter for.
        strength: what the patches are multiplied by; at 0 nothing is applied.

    Raises:
        LoraError: not one of its tensors belongs to this model, or one has another size than the model's.
    """
    tensors = comfy.lora_convert.convert_lora(comfy.utils.load_torch_file(str(path), safe_load=True))
    names = lora_names(model)
    patches = comfy.lora.load_lora(tensors, names, log_missing=False)
    left = [name for name in tensors if names.get(_module(name, names) or "") not in patches]
    if not patches:
        raise LoraError(
            f"{os.path.basename(path)}: none of its {len(tensors)} tensors belongs to this model "
            f"({', '.join(list(tensors)[:_NAMED_AT_MOST])}, ...)"
        )
    if misfit := _misfit(patches, model):
        raise LoraError(f"{os.path.basename(path)}: {misfit}")
    if strength == 0:
        return model, f"{len(patches)} layers, at strength 0: not applied"
    patched = model.clone()
    patched.add_patches(patches, strength)
    line = f"{len(patches)} layers at strength {strength:g}"
    if left:
        more = f" and {len(left) - _NAMED_AT_MOST} more" if len(left) > _NAMED_AT_MOST else ""
        line += f"; {len(left)} of {len(tensors)} tensors match nothing: {', '.join(left[:_NAMED_AT_MOST])}{more}"
    return patched, line


def lora_names(model: ModelPatcher) -> dict[str, Target]:
    """Every name under which a LoRA may speak of a weight -> it, or a slice (dimension, start, length) of it."""
    names: dict[str, Target] = comfy.lora.model_lora_keys_unet(model.model, {})
    shapes = {name: tuple(tensor.shape) for name, tensor in model.model.state_dict().items()}
    for spelled, target in _split_names(shapes):
        for prefix in _PREFIXES:
            names.setdefault(prefix + spelled, target)
        for prefix in _FLAT_PREFIXES:
            names.setdefault(prefix + spelled.replace(".", "_"), target)
    return names


def _split_names(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Target]]:
    """Names without a prefix, in both spellings of attention."""
    for name, shape in shapes.items():
        if not (name.startswith("diffusion_model.") and name.endswith(".weight")):
            continue
        module = name.removeprefix("diffusion_model.").removesuffix(".weight")
        yield module, name
        if name.startswith(_BLOCKS) and name.endswith(_FUSED):
            attention, third = module.removesuffix("qkv"), shape[0] // 3
            for number, part in enumerate(("to_q", "to_k", "to_v")):
                yield attention + part, (name, (0, number * third, third))
        elif module.endswith(".attention.o"):
            yield f"{module.removesuffix('o')}to_out.0", name


def _misfit(patches: Mapping[Target, Any], model: ModelPatcher) -> str | None:
    """Which layer of a LoRA has another size than the model's, or None. core would only log it, and leave it out."""
    weights = model.model.state_dict()
    for target, adapter in patches.items():
        name, part = (target, None) if isinstance(target, str) else target
        out, *inner = weights[name].shape
        expected = [out if part is None else part[2], *inner]
        if isinstance(adapter, LoRAAdapter):
            up, down = adapter.weights[:2]
            if [up.shape[0], *down.shape[1:]] != expected:
                return f"its layer for {name} is {[up.shape[0], *down.shape[1:]]}, the model's {expected}"
    return None


def _module(tensor: str, names: Mapping[str, Target]) -> str | None:
    """The name of a weight that a LoRA's tensor begins with: `....to_q` of `....to_q.lora_A.weight`."""
    while "." in tensor:
        tensor = tensor.rpartition(".")[0]
        for candidate in (tensor, tensor.removesuffix("_lora")):
            if candidate in names:
                return candidate
    return None
