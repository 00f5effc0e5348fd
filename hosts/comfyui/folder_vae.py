"""A folder's VAE -> core's VAE, out of core's own classes at the file's sizes.

The file holds its normalisation in the order in which the reference's tokens hold a patch, rows and columns of the
patch before channels; core's latents hold channels first, and its own file of this VAE is in that order. Sources:
diffusers' `pipeline_ideogram4.py`, core's `AutoencodingEngineLegacy.decode` and `Ideogram4Transformer2DModel`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.utils
import torch
from comfy.diffusers_convert import convert_vae_state_dict
from comfy.ldm.models.autoencoder import AutoencoderKL
from comfy.sd import VAE

from ...checkpoint.errors import CheckpointError
from ...checkpoint.expectations import FLOATS, Expectations
from ...checkpoint.header import TensorInfo
from ...checkpoint.vae import Vae, inspect_vae
from ...checkpoint.values import refuse_bad_values, refuse_empty_end

_GROUPS = 32  # of every norm in core's VAE classes
_ADVICE = "Use the vae/ of ideogram-ai/ideogram-4-fp8, or one of its kind."
_BATCH_COUNT = "bn.num_batches_tracked"  # counts training steps; nothing reads it


def load_vae(folder: Path) -> VAE:
    """The VAE of vae/, a FLUX.2 VAE of any size under diffusers' names.

    Raises:
        CheckpointError: core's classes cannot be built at its sizes, or it is incomplete.
    """
    found = inspect_vae(folder)
    config = _config(found)
    _check(found, config)
    tensors = {}
    for file in found.header.paths:
        tensors.update(comfy.utils.load_torch_file(str(file)))
    refuse_empty_end(found.header.paths)
    refuse_bad_values(found.header.file, tensors)
    for name in ("bn.running_mean", "bn.running_var"):
        tensors[name] = tensors[name].view(-1, found.channels).t().reshape(-1).contiguous()
    vae = VAE(convert_vae_state_dict(tensors), config={"params": config})
    # What core sets where it recognises a VAE by itself; for a given config it leaves those of SD 1.5.
    estimate = vae.memory_used_decode
    vae.memory_used_decode = lambda shape, dtype: 4.0 * estimate(shape, dtype)
    vae.downscale_ratio = vae.upscale_ratio = 16
    vae.latent_channels = found.tokens
    vae.first_stage_model.bn_eps = found.eps
    return vae


def _config(found: Vae) -> dict[str, Any]:
    """Arguments of core's AutoencoderKL."""
    file = found.header.file
    if found.groups != _GROUPS:
        raise CheckpointError(
            file, f"its norms have {found.groups} groups, those of ComfyUI's VAE have {_GROUPS}", _ADVICE
        )
    sides = []
    for side, widths in (("encoder", found.encoder), ("decoder", found.decoder)):
        if any(width % widths[0] for width in widths) or widths[0] % _GROUPS:
            raise CheckpointError(
                file,
                f"its {side} is {' '.join(map(str, widths))} channels wide; ComfyUI's VAE takes multiples of "
                f"the first, which is {_GROUPS} or a multiple of it",
                _ADVICE,
            )
        sides.append(
            {
                "double_z": True,
                "z_channels": found.channels,
                "resolution": 256,
                "in_channels": 3,
                "out_ch": 3,
                "ch": widths[0],
                "ch_mult": [width // widths[0] for width in widths],
                "num_res_blocks": found.blocks,
                "attn_resolutions": [],
                "dropout": 0.0,
                "batch_norm_latent": True,
            }
        )
    return {"ddconfig": sides[0], "decoder_ddconfig": sides[1], "embed_dim": found.channels}


def _check(found: Vae, config: dict[str, Any]) -> None:
    """Asks for every tensor that core's module of that config has; a missing one it would only log."""
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in AutoencoderKL(**config).state_dict().items()}
    there: dict[str, TensorInfo] = {}
    spelled: dict[str, str] = {}
    for name, info in found.header.tensors.items():
        ((core, shape),) = convert_vae_state_dict({name: torch.empty(info.shape, device="meta")}).items()
        there[core], spelled[core] = TensorInfo(info.dtype, tuple(shape.shape)), name
    tensors = Expectations({spelled[core]: info for core, info in there.items()})
    tensors.allow(_BATCH_COUNT)
    for core, shape in wanted.items():
        if core != _BATCH_COUNT:
            tensors.expect(spelled.get(core, core), (shape,), FLOATS)
    tensors.settle(found.header, "", _ADVICE)
