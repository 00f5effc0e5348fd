"""Loads a checkpoint's transformers and VAE into diffusers' classes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, Ideogram4Transformer2DModel
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_ideogram4 import Ideogram4MRoPE
from safetensors.torch import load_file
from torch import nn

from ...checkpoint.convert import StateDict, dequantise_row_wise, strip_prefix, to_split_names
from ...checkpoint.errors import CheckpointError
from ...checkpoint.folder import CheckpointFolder, model_file
from ...checkpoint.header import Header, read_header
from ...checkpoint.inspection import Checkpoint, inspect_checkpoint
from ...checkpoint.layout import ATTENTION_CONFIG
from ...checkpoint.shards import find_shards
from ...checkpoint.values import refuse_bad_values, refuse_empty_end
from ...kernels.memory import is_out_of_memory

_DOWNLOAD_AGAIN = "Download this folder again."
_BATCH_COUNT = "bn.num_batches_tracked"  # counts training steps; decoding never reads it


@dataclass(frozen=True)
class Models:
    """What denoises and decodes, on one device; `unconditional` is None where the folder was opened without it."""

    transformer: Ideogram4Transformer2DModel
    unconditional: Ideogram4Transformer2DModel | None
    vae: AutoencoderKLFlux2
    checkpoint: Checkpoint


def load_models(folder: CheckpointFolder, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Models:
    """Loads the transformers and the VAE, to compute in `dtype`.

    Raises:
        CheckpointError: one of them cannot be loaded.
    """
    unconditional = folder.unconditional and load_transformer(folder.unconditional, device, dtype)[0]
    transformer, checkpoint = load_transformer(folder.transformer, device, dtype)
    return Models(transformer, unconditional, load_vae(folder.vae, device, dtype), checkpoint)


def load_transformer(
    file: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[Ideogram4Transformer2DModel, Checkpoint]:
    """diffusers' transformer with the weights of `file` and its shards, `dtype` on `device`, and what the file is.

    Its norms are torch.nn.RMSNorm: diffusers' own rounds once more, between the division and the weight, unlike the
    reference implementation and ComfyUI.

    Raises:
        CheckpointError: the file is no complete Ideogram 4 transformer, or is quantised for ComfyUI.
    """
    checkpoint = inspect_checkpoint(file)
    if checkpoint.layout.weights not in ("plain", "fp8_row_wise"):
        raise CheckpointError(
            file,
            f"{checkpoint.layout.describe()}: made for ComfyUI's quantised operations, which diffusers does not have",
            "Use the official row-wise fp8 file or a bf16 one.",
        )
    dimensions = checkpoint.dimensions
    with torch.device("meta"):
        model = Ideogram4Transformer2DModel(**dimensions.as_config())
        replace_norms(model)
    weights = strip_prefix(read_tensors(checkpoint.header, device), checkpoint.layout.prefix)
    refuse_empty_end(checkpoint.header.paths)
    refuse_bad_values(file, weights)
    # Row-wise fp8 stands for bfloat16 numbers, whatever computes with them.
    stored = torch.bfloat16 if checkpoint.layout.weights == "fp8_row_wise" else dtype
    plain = to_split_names(dequantise_row_wise(weights, stored))
    numbers = {name: tensor.to(dtype) for name, tensor in plain.items() if not name.endswith(ATTENTION_CONFIG)}
    model.load_state_dict(numbers, assign=True)
    # Its frequencies are in no checkpoint, and must stay fp32: in bf16 image positions beyond 65536 would collapse.
    model.rotary_emb = Ideogram4MRoPE(
        dimensions.attention_head_dim, dimensions.rope_theta, dimensions.mrope_section
    ).to(device)
    return model.eval().requires_grad_(False), checkpoint


def replace_norms(model: nn.Module) -> None:
    """Puts an empty torch.nn.RMSNorm of the same size and epsilon in the place of every diffusers RMSNorm."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, RMSNorm):
                setattr(parent, name, nn.RMSNorm(list(child.dim), eps=child.eps))


def read_tensors(header: Header, device: torch.device) -> StateDict:
    """Every tensor of a model's files; a weight and its scale may be in two of them."""
    tensors: StateDict = {}
    for path in header.paths:
        tensors |= load_file(path, device=str(device))
    return tensors


def load_vae(folder: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> AutoencoderKLFlux2:
    """The VAE in `dtype` on `device`.

    Raises:
        CheckpointError: the folder holds no FLUX.2 VAE that diffusers can load, or not all of it.
    """
    read_header(find_shards(model_file(folder)))  # says what is wrong with a damaged file, which diffusers does not
    with reading(folder, "VAE"):
        vae, report = AutoencoderKLFlux2.from_pretrained(
            folder,
            torch_dtype=dtype,
            local_files_only=True,
            low_cpu_mem_usage=False,
            output_loading_info=True,
        )
    refuse_missing(folder, "VAE", set(report["missing_keys"]) - {_BATCH_COUNT})
    # A CPU's convolutions in bfloat16 are fast with the channels last alone: the demo's picture decodes in 2 s on two
    # cores, and in 69 s with its channels first.
    if device.type == "cpu":
        vae.to(memory_format=torch.channels_last)
    return vae.to(device).eval().requires_grad_(False)


def refuse_missing(folder: Path, part: str, missing: Collection[str]) -> None:
    """Raises for tensors that a part's library would leave uninitialised, with no more than a log line.

    Raises:
        CheckpointError: `missing` is not empty.
    """
    if missing:
        counted = f"{len(missing)} tensor{'s' if len(missing) > 1 else ''} of the {part}"
        raise CheckpointError(
            folder, f"{counted} {'are' if len(missing) > 1 else 'is'} missing", _DOWNLOAD_AGAIN, min(missing)
        )


@contextmanager
def reading(folder: Path, part: str) -> Iterator[None]:
    """Within it, what a part's own library raises becomes an error that names the part and its folder.

    Raises:
        CheckpointError: with the first line of what the library says.
    """
    dtype = torch.get_default_dtype()
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # diffusers, transformers, tokenizers and Jinja share no base class
        torch.set_default_dtype(dtype)  # transformers and diffusers change it, and leave it so where they fail
        if is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(folder, f"the {part} cannot be loaded ({reason})", _DOWNLOAD_AGAIN) from error
