"""A LoRA of any naming on an Ideogram 4 MODEL, through core's own adapters.

core knows its own names, ComfyUI's and kohya's of fused attention (ai-toolkit trains those). diffusers trains q, k and
v apart, which are thirds of the rows of the fused weight: core patches slices of a weight where it is given them.
Source of the names: diffusers' `transformer_ideogram4.py` and its LoRA trainer; core's map for another split model
(`z_image_to_diffusers` in `comfy/utils.py`) is of the same kind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher

from ...checkpoint.errors import CheckpointError
from ...checkpoint.header import read_header
from ...kernels.memory import is_out_of_memory
from .lora_alpha import metadata_alphas, scales
from .lora_size import patch_size

Target = str | tuple[str, tuple[int, int, int]]

_BLOCKS = "diffusion_model.layers."
_FUSED = ".attention.qkv.weight"
_PREFIXES = ("", "transformer.", "conditional_transformer.", "diffusion_model.", "base_model.model.")
_FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
_NAMED_AT_MOST = 3
# What half a pair, an alpha of several values, a rank of 0 and a pattern that is no regular expression raise.
_DAMAGE = (LookupError, RuntimeError, ValueError, TypeError, ArithmeticError, re.error)


class LoraError(ValueError):
    """A file that cannot be put on the model, in one sentence."""


def apply_lora(model: ModelPatcher, path: str | os.PathLike[str], strength: float) -> tuple[ModelPatcher, str]:
    """A clone of `model` with the LoRA on it, `model` itself at strength 0, and a line on how much of the file it took.

    Args:
        model: an Ideogram 4 MODEL; at any fusion quality, which goes on holding.
        path: the LoRA's file: of diffusers, ai-toolkit, kohya or ComfyUI; LoKr, LoHa and whatever else core has an
            adapter for.
        strength: what the patches are multiplied by; at 0 nothing is applied.

    Raises:
        LoraError: the file is damaged, not one of its tensors belongs to this model, one has another size than the
            model's, or a pair is incomplete.
    """
    stored, metadata = _read(Path(path))
    names = lora_names(model)
    weights = model.model.state_dict()
    try:
        tensors = comfy.lora_convert.convert_lora(stored)
        alphas = metadata_alphas(tensors, metadata)
        found = comfy.lora.load_lora({**tensors, **alphas}, names, log_missing=False)
    except _DAMAGE as error:
        if is_out_of_memory(error):
            raise
        raise LoraError(f"{os.path.basename(path)}: it is damaged ({type(error).__name__}: {error})") from error
    # core makes patches for biases too, of weights that have none and of slices.
    patches = {target: patch for target, patch in found.items() if _weight(target) in weights}
    taken = set().union(*(getattr(patch, "loaded_keys", ()) for patch in patches.values()))
    left = [name for name in tensors if not _counts(name, names, patches, taken)]
    if not patches:
        raise LoraError(
            f"{os.path.basename(path)}: none of its {len(tensors)} tensors belongs to this model "
            f"({', '.join([*list(tensors)[:_NAMED_AT_MOST], '...'])})"
        )
    if misfit := _misfit(patches, weights):
        raise LoraError(f"{os.path.basename(path)}: {misfit}")
    if strength == 0:
        return model, f"{len(patches)} layers, at strength 0: not applied"
    patched = model.clone()
    patched.add_patches(patches, strength)
    line = f"{len(patches)} layers at strength {strength:g}"
    if (found_scales := scales(tensors, alphas)) not in ([], [1.0]):
        line += f" x {' or '.join(f'{scale:g}' for scale in found_scales)} of its alpha"
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


def _weight(target: Target) -> str:
    name = target if isinstance(target, str) else target[0]
    return name if isinstance(name, str) else ""


def _counts(tensor: str, names: Mapping[str, Target], patches: Mapping[Target, Any], taken: set[str]) -> bool:
    """Whether a tensor has gone into one of the patches."""
    target = names.get(_module(tensor, names) or "")
    if target is None or target not in patches:
        return False
    if tensor.endswith((".diff_b", ".b_norm")):
        return isinstance(target, str) and f"{target.removesuffix('.weight')}.bias" in patches
    return tensor in taken or tensor.endswith((".diff", ".set_weight", ".w_norm"))


def _read(path: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, str] | None]:
    """Tensors and metadata; of a damaged or empty file, in words. Raises LoraError."""
    if path.suffix.lower() in (".safetensors", ".sft"):
        try:
            read_header(path)
        except CheckpointError as error:
            raise LoraError(f"{path.name}: {error.problem}") from error
    try:
        stored, metadata = comfy.utils.load_torch_file(str(path), safe_load=True, return_metadata=True)
    except OSError as error:
        raise LoraError(f"{path.name}: it cannot be read ({error.strerror or error})") from error
    except Exception as error:  # whatever an unpickler meets, and core in what it made
        if is_out_of_memory(error):
            raise
        raise LoraError(f"{path.name}: it is damaged ({type(error).__name__}: {error})") from error
    found = stored.items() if isinstance(stored, dict) else ()
    # What else a pickle holds, an epoch for one, core's own loader leaves alone too.
    stored = {name: tensor for name, tensor in found if isinstance(name, str) and isinstance(tensor, torch.Tensor)}
    if not stored:
        raise LoraError(f"{path.name}: it holds no tensors")
    spoilt = next((name for name, tensor in stored.items() if not _finite(tensor)), None)
    if spoilt is not None:
        raise LoraError(f"{path.name}: it is damaged ({spoilt} holds values that are no numbers)")
    return stored, metadata


def _finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    if tensor.dtype == torch.float8_e4m3fn:  # has no `isfinite`
        tensor = tensor.float()
    try:
        return bool(tensor.isfinite().all())
    except NotImplementedError:  # of a kind that no LoRA has: core's to refuse, or nobody's
        return True


def _misfit(patches: Mapping[Target, Any], weights: Mapping[str, Any]) -> str | None:
    """Which layer of a LoRA has another size than the model's, or None. core would only log it, and leave it out."""
    for target, patch in patches.items():
        name, part = (target, None) if isinstance(target, str) else target
        out, *inner = weights[name].shape
        expected = [out if part is None else part[2], *inner]
        size = patch_size(patch)
        if size is not None and size != expected:
            return f"its layer for {name} is {size}, the model's {expected}"
    return None


def _module(tensor: str, names: Mapping[str, Target]) -> str | None:
    """The name of a weight that a LoRA's tensor begins with: `....to_q` of `....to_q.lora_A.weight`."""
    while "." in tensor:
        tensor = tensor.rpartition(".")[0]
        for candidate in (tensor, tensor.removesuffix("_lora")):
            if candidate in names:
                return candidate
    return None
