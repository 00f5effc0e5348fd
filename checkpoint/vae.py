"""A FLUX.2 VAE of any size as diffusers stores it, and its sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import read_config
from .errors import CheckpointError
from .folder import model_file
from .header import Header, read_header
from .shards import find_shards

_ADVICE = "Put the vae/ of ideogram-ai/ideogram-4-fp8 there."
_LEVELS = 4  # each but the last halves the picture's sides
_PATCH = 2 * 2  # latent pixels in a token

# diffusers' defaults (`AutoencoderKLFlux2`), for a folder without a config.json.
_DEFAULTS: Mapping[str, Any] = {"norm_num_groups": 32, "batch_norm_eps": 1e-4}


@dataclass(frozen=True)
class Vae:
    """A file that holds a VAE, and what it is built of.

    Attributes:
        header: of the file.
        encoder: widths of the encoder's levels, the one at the picture's size first.
        decoder: likewise.
        blocks: residual blocks of the encoder's levels; the decoder has one more in each.
        channels: of a latent pixel.
        groups: of every group norm.
        eps: of the normalisation of latents.
    """

    header: Header
    encoder: tuple[int, ...]
    decoder: tuple[int, ...]
    blocks: int
    channels: int
    groups: int
    eps: float

    @property
    def tokens(self) -> int:
        """Channels of a latent token, 2 x 2 latent pixels."""
        return _PATCH * self.channels


def inspect_vae(folder: Path) -> Vae:
    """Reads the header and the config.json in a folder; no weights.

    Raises:
        CheckpointError: they do not hold a FLUX.2 VAE under diffusers' names.
    """
    header = read_header(find_shards(model_file(folder)))
    config = read_config(folder)
    if config is not None and not isinstance(config, dict):
        raise CheckpointError(folder / "config.json", "it describes no VAE", _ADVICE)
    settings = {**_DEFAULTS, **(config or {})}

    def shape(name: str, rank: int) -> tuple[int, ...]:
        info = header.tensors.get(name)
        if info is None or len(info.shape) != rank or 0 in info.shape:
            problem = "this is no FLUX.2 VAE of diffusers: it lacks a tensor"
            if info is not None:
                problem = f"a tensor of shape {list(info.shape)}"
            raise CheckpointError(header.file, problem, _ADVICE, name)
        return info.shape

    encoder = tuple(shape(f"encoder.down_blocks.{i}.resnets.0.conv1.weight", 4)[0] for i in range(_LEVELS))
    decoder = tuple(shape(f"decoder.up_blocks.{i}.resnets.0.conv1.weight", 4)[0] for i in reversed(range(_LEVELS)))
    block = re.compile(r"encoder\.down_blocks\.0\.resnets\.(\d+)\.conv1\.weight")
    channels = shape("decoder.conv_in.weight", 4)[1]
    if shape("bn.running_mean", 1) != (_PATCH * channels,):
        raise CheckpointError(
            header.file, f"its normalisation is not that of tokens of {_PATCH * channels}", _ADVICE, "bn.running_mean"
        )
    groups, eps = settings["norm_num_groups"], settings["batch_norm_eps"]
    if type(groups) is not int or type(eps) not in (int, float) or not 0 < eps < 1:
        raise CheckpointError(header.file, f"its config says {groups!r} groups and an epsilon of {eps!r}", _ADVICE)
    return Vae(
        header,
        encoder,
        decoder,
        sum(block.fullmatch(name) is not None for name in header.tensors),
        channels,
        groups,
        float(eps),
    )
