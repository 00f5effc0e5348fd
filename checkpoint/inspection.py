"""Everything a host must know of a file before it reads a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .completeness import check_complete
from .config import find_config
from .dimensions import Dimensions, read_dimensions
from .header import Header, read_header
from .layout import Layout, identify
from .quantisation import check_marks
from .shards import find_shards


@dataclass(frozen=True)
class Checkpoint:
    """A file, proven to hold one complete Ideogram 4 transformer."""

    header: Header
    layout: Layout
    dimensions: Dimensions

    def describe(self) -> str:
        """Such as "official row-wise fp8, fused qkv, 34 layers x 4608"."""
        return f"{self.layout.describe()}, {self.dimensions.num_layers} layers x {self.dimensions.hidden_size}"


def inspect_checkpoint(path: Path) -> Checkpoint:
    """Reads the headers of a file, or of all the shards it is one of, the config.json beside it and ComfyUI's marks.

    Raises:
        CheckpointError: it is no complete Ideogram 4 transformer in a layout that the pack reads.
    """
    header = read_header(find_shards(path))
    layout = identify(header)
    dimensions = read_dimensions(header, layout, find_config(path))
    check_complete(header, layout, dimensions)
    if layout.weights in ("fp8_scaled", "comfy_mixed"):
        check_marks(header, layout.prefix)
    return Checkpoint(header, layout, dimensions)
