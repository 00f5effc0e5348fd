"""A transformer file of any published layout and any size -> ComfyUI's MODEL."""

from __future__ import annotations

import math
import os
from pathlib import Path

import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher

from ...checkpoint.convert import StateDict, dequantise_row_wise, strip_prefix, to_fused_names
from ...checkpoint.errors import CheckpointError
from ...checkpoint.inspection import Checkpoint, inspect_checkpoint
from ...checkpoint.values import refuse_bad_values, refuse_empty_end
from .loaded import refuse_half_loaded
from .row_wise import BF16, FP8, adopt, keeps_fp8, marked

# Core reads any other ending as a pickle.
_ENDINGS = (".safetensors", ".sft")


def settle_row_wise(path: str | os.PathLike[str], row_wise_weights: str) -> str:
    """`auto` as what it comes to for this file and the memory there is now, so that all that follows agrees on it.

    Raises:
        CheckpointError: as `load_diffusion_model`.
        ValueError: no such choice.
    """
    return FP8 if keeps_fp8(row_wise_weights, _parameters(_inspect(path))) else BF16


def describe_file(path: str | os.PathLike[str], row_wise_weights: str = BF16) -> str:
    """Such as "official row-wise fp8, fused qkv, 34 layers x 4608, as bf16"; reads no weights.

    Args:
        path: as of `load_diffusion_model`.
        row_wise_weights: likewise.

    Raises:
        CheckpointError: as `load_diffusion_model`.
    """
    checkpoint = _inspect(path)
    if checkpoint.layout.weights != "fp8_row_wise":
        return checkpoint.describe()
    kept = keeps_fp8(row_wise_weights, _parameters(checkpoint))
    return f"{checkpoint.describe()}, {'kept as fp8' if kept else 'as bf16'}"


def load_diffusion_model(
    path: str | os.PathLike[str], row_wise_weights: str = BF16, disable_dynamic: bool = False
) -> ModelPatcher:
    """Loads an Ideogram 4 transformer the way core's Load Diffusion Model does, once the file is proven complete.

    Core's own loader takes the official fp8 file and diffusers' names for its own layout and drops what it does not
    know. Here row-wise fp8 becomes bfloat16 on the CPU (twice the file's size in RAM) or is dequantised in each call,
    split q, k, v are fused, and ComfyUI's own formats go to core's quantised operations as they are.

    Args:
        path: the .safetensors file, or any shard of it.
        row_wise_weights: of an official file: `bf16`, `fp8` (half the memory, slower) or `auto` (`row_wise.keeps_fp8`).
            The pictures are the same, but for a LoRA merged into fp8, which is rounded to it. Split q, k, v are
            copied together in either.
        disable_dynamic: for core, which asks for a copy without dynamic VRAM through `cached_patcher_init`.

    Returns:
        A patcher that core can load again from the file: `clone(force_deepcopy=True)`, MultiGPU and torch.compile
        rely on that.

    Raises:
        CheckpointError: the file is no complete Ideogram 4 transformer in a layout that the pack reads, or not all of
            it fits the transformer of the installed ComfyUI.
    """
    checkpoint = _inspect(path)
    row_wise = checkpoint.layout.weights == "fp8_row_wise"
    kept = keeps_fp8(row_wise_weights, _parameters(checkpoint)) if row_wise else False
    state_dict, metadata = _read(checkpoint, kept)
    patcher = _build(checkpoint, state_dict, metadata, disable_dynamic)
    if kept:
        adopt(patcher.model.diffusion_model)
    # As it was decided here: a copy made later must not come out otherwise because memory is fuller then.
    patcher.cached_patcher_init = (load_diffusion_model, (os.fspath(path), FP8 if kept else BF16))
    return patcher


def _inspect(path: str | os.PathLike[str]) -> Checkpoint:
    checkpoint = inspect_checkpoint(Path(path))
    for file in checkpoint.header.paths:
        if file.suffix.lower() not in _ENDINGS:
            raise CheckpointError(
                file, "a safetensors file under another ending", "Rename it so that it ends in .safetensors."
            )
    return checkpoint


def _parameters(checkpoint: Checkpoint) -> int:
    prefix, tensors = checkpoint.layout.prefix, checkpoint.header.tensors.items()
    return sum(math.prod(t.shape) for name, t in tensors if name.startswith(prefix) and not name.endswith("_scale"))


def _read(checkpoint: Checkpoint, keeps_row_wise: bool) -> tuple[StateDict, dict[str, str]]:
    """The tensors under the names that core's transformer has, plain or in core's own quantised form."""
    layout = checkpoint.layout
    state_dict: StateDict = {}
    for file in checkpoint.header.paths:
        state_dict.update(comfy.utils.load_torch_file(str(file)))
    metadata = dict(checkpoint.header.metadata)
    if layout.weights in ("fp8_scaled", "comfy_mixed"):
        # Before the prefix goes: the metadata that names quantised layers names them with it.
        state_dict, metadata = comfy.utils.convert_old_quants(state_dict, layout.prefix, metadata=metadata)
    state_dict = strip_prefix(state_dict, layout.prefix)
    if layout.prefix and layout.weights in ("fp8_scaled", "comfy_mixed"):
        # And once more, as core does, for a metadata that names them without; what it names with it has no place now.
        state_dict, metadata = comfy.utils.convert_old_quants(state_dict, "", metadata=metadata)
        state_dict = {name: tensor for name, tensor in state_dict.items() if not name.startswith(layout.prefix)}
    refuse_empty_end(checkpoint.header.paths)
    refuse_bad_values(checkpoint.header.file, state_dict)
    try:
        state_dict = to_fused_names(state_dict)
    except ValueError as error:
        raise CheckpointError(checkpoint.header.file, str(error), "Use a file that was converted in one go.") from error
    if layout.weights == "fp8_row_wise":
        state_dict = marked(state_dict) if keeps_row_wise else dequantise_row_wise(state_dict, torch.bfloat16)
    return state_dict, metadata


def _build(
    checkpoint: Checkpoint, state_dict: StateDict, metadata: dict[str, str], disable_dynamic: bool
) -> ModelPatcher:
    """core's `load_diffusion_model_state_dict`, with the file's dimensions in place of the official ones."""
    management = comfy.model_management
    config = comfy.model_detection.model_config_from_unet(state_dict, "", metadata=metadata)
    if config is None or config.unet_config.get("image_model") != "ideogram4":
        raise CheckpointError(
            checkpoint.header.file,
            "the installed ComfyUI does not know Ideogram 4",
            "Update ComfyUI to 0.33 or newer.",
        )
    config.unet_config.update(checkpoint.dimensions.as_config())

    load_device, offload_device = management.get_torch_device(), management.unet_offload_device()
    quantised = config.quant_config is not None
    dtype = management.unet_dtype(
        model_params=comfy.utils.calculate_parameters(state_dict),
        supported_dtypes=config.supported_inference_dtypes,
        weight_dtype=None if quantised else comfy.utils.weight_dtype(state_dict),
    )
    manual_cast = management.unet_manual_cast(
        None if quantised else dtype, load_device, config.supported_inference_dtypes
    )
    config.set_inference_dtype(dtype, manual_cast, device=load_device)

    model = config.get_model(state_dict, "")
    # main.py replaces CoreModelPatcher when it turns dynamic VRAM on, hence the late look-up.
    patcher_class = ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    patcher = patcher_class(model, load_device=load_device, offload_device=offload_device)
    offloads_to_cpu = management.is_device_cpu(offload_device)
    if not offloads_to_cpu:
        model.to(offload_device)
    # Dequantised weights are nobody else's: taking them over spares a second copy of the whole model in RAM.
    owned = (
        checkpoint.layout.weights == "fp8_row_wise" and not quantised and dtype == torch.bfloat16 and offloads_to_cpu
    )
    given = set(state_dict)
    model.load_model_weights(state_dict, "", assign=patcher.is_dynamic() or owned)
    refuse_half_loaded(checkpoint.header.file, model.diffusion_model, given)
    return patcher
