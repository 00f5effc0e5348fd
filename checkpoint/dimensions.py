"""The sizes of a transformer: from its tensors, and from config.json what no tensor shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from reprlib import repr as shortened
from typing import Any

from .config import config_in_metadata
from .errors import CheckpointError
from .header import Header
from .layout import Layout

# ideogram-ai/ideogram-4: heads of 256, and what its config.json says of rotation and normalisation.
_OFFICIAL_HEAD_DIM = 256
_OFFICIAL: Mapping[str, Any] = {"rope_theta": 5_000_000, "mrope_section": (24, 20, 20), "norm_eps": 1e-5}
_PATCH_VALUES = 4  # a token holds 2 x 2 latent pixels
_WHOLE_FILE = "Use a complete transformer file."


@dataclass(frozen=True)
class Dimensions:
    """Constructor arguments of the transformer, under diffusers' names (`Ideogram4Transformer2DModel`).

    Attributes:
        in_channels: channels of a latent token, also of the output.
        num_layers: blocks.
        num_attention_heads: heads of one block.
        attention_head_dim: channels of one head.
        intermediate_size: width inside the SwiGLU feed-forward.
        adaln_dim: width of the time embedding that the blocks modulate with.
        llm_features_dim: channels of one text token's features.
        rope_theta: base of the rotary frequencies.
        mrope_section: frequencies for time, height and width.
        norm_eps: epsilon of the blocks' four RMS norms.
    """

    in_channels: int
    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    intermediate_size: int
    adaln_dim: int
    llm_features_dim: int
    rope_theta: float
    mrope_section: tuple[int, int, int]
    norm_eps: float

    @property
    def hidden_size(self) -> int:
        """Channels of a token inside the transformer."""
        return self.num_attention_heads * self.attention_head_dim

    def as_config(self) -> dict[str, Any]:
        """Keyword arguments for either host's transformer class."""
        return asdict(self)


def read_dimensions(header: Header, layout: Layout, config: Mapping[str, Any] | None = None) -> Dimensions:
    """The dimensions of the transformer in a file.

    Args:
        header: the file.
        layout: what `identify` said of it.
        config: the config.json that belongs to it; without one, the file's metadata is asked, then, for heads of
            256 channels, the official values are taken.

    Raises:
        CheckpointError: a tensor that shows a size is absent, empty or of another rank, the config contradicts the
            tensors, or rope_theta, mrope_section or norm_eps is not to be had.
    """
    sizes = _sizes(header, layout)
    config = config or config_in_metadata(header) or {}
    for name, size in sizes.items():
        if name in config and config[name] != size:
            raise CheckpointError(
                header.file,
                f"its config says {name} is {shortened(config[name])}, the tensors say {size}",
                "Put the config.json of this very model beside it, or remove the one that is there.",
            )
    return Dimensions(**sizes, **_rotation(header, config, sizes["attention_head_dim"]))


def _sizes(header: Header, layout: Layout) -> dict[str, Any]:
    def shape(name: str, rank: int) -> tuple[int, ...]:
        info = header.tensors.get(layout.prefix + name)
        if info is None or len(info.shape) != rank:
            problem = "it lacks a tensor" if info is None else f"a tensor of shape {list(info.shape)}, not rank {rank}"
            raise CheckpointError(header.file, problem, _WHOLE_FILE, layout.prefix + name)
        return info.shape

    hidden, channels = shape("input_proj.weight", 2)
    (head,) = shape("layers.0.attention.norm_q.weight", 1)
    if head == 0 or hidden % head or head % 2:
        raise CheckpointError(
            header.file,
            f"{hidden} channels do not divide into heads of {head}, an even number",
            _WHOLE_FILE,
            f"{layout.prefix}layers.0.attention.norm_q.weight",
        )
    blocks = layout.prefix + "layers."
    layers = {name.removeprefix(blocks).partition(".")[0] for name in header.tensors if name.startswith(blocks)}
    sizes = {
        "in_channels": channels,
        "num_layers": len(layers),
        "num_attention_heads": hidden // head,
        "attention_head_dim": head,
        "intermediate_size": shape("layers.0.feed_forward.w1.weight", 2)[0],
        "adaln_dim": shape("adaln_proj.weight", 2)[0],
        "llm_features_dim": shape("llm_cond_norm.weight", 1)[0],
    }
    for name, size in sizes.items():
        if size < 1:
            raise CheckpointError(header.file, f"its tensors have {name} {size}", _WHOLE_FILE)
    if channels % _PATCH_VALUES:
        raise CheckpointError(
            header.file,
            f"a token of {channels} channels cannot hold a patch of 2 x 2 latent pixels",
            _WHOLE_FILE,
            f"{layout.prefix}input_proj.weight",
        )
    return sizes


def _rotation(header: Header, config: Mapping[str, Any], head: int) -> dict[str, Any]:
    """The three that no tensor shows."""
    found = {name: config[name] for name in _OFFICIAL if name in config}
    if head == _OFFICIAL_HEAD_DIM:
        found = {**_OFFICIAL, **found}
    advice = (
        f"Put the model's config.json (diffusers' transformer/config.json) into {header.file.parent}, with "
        f"{', '.join(_OFFICIAL)} in it."
    )
    absent = [name for name in _OFFICIAL if name not in found]
    if absent:
        raise CheckpointError(
            header.file,
            f"{', '.join(absent)} cannot be read from tensors, and heads of {head} are not the official model's",
            advice,
        )
    theta, section, eps = found["rope_theta"], found["mrope_section"], found["norm_eps"]
    if not (_is_number(theta) and theta > 1):
        raise CheckpointError(header.file, f"rope_theta is {shortened(theta)}, not a number above 1", advice)
    if not (_is_number(eps) and 0 < eps < 1):
        raise CheckpointError(header.file, f"norm_eps is {shortened(eps)}, not a number between 0 and 1", advice)
    # Height takes frequencies 1, 4, 7, ... and width 2, 5, 8, ...: the last one must exist.
    if (
        not isinstance(section, (list, tuple))
        or len(section) != 3
        or not all(type(length) is int and length > 0 for length in section)
        or 3 * section[1] - 2 >= head // 2
        or 3 * section[2] - 1 >= head // 2
    ):
        raise CheckpointError(
            header.file,
            f"mrope_section is {shortened(section)}, "
            f"not three lengths that fit into the {head // 2} frequencies of a head",
            advice,
        )
    return {"rope_theta": float(theta), "mrope_section": tuple(section), "norm_eps": float(eps)}


def _is_number(value: Any) -> bool:
    """Whether a value is finite as a float: JSON may hold Infinity, NaN and integers beyond every float."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False
