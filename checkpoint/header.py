"""The names, dtypes and shapes in safetensors files, without reading a tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .errors import CheckpointError

_DOWNLOAD_AGAIN = "Download it again and compare the size with the one shown on its page."
_USE_SAFETENSORS = "Use the .safetensors version of the model."

# First bytes (lower case) of what is most often found under a checkpoint's name.
_OTHER_FORMATS: tuple[tuple[bytes, str, str], ...] = (
    (
        b"version https://git-lfs",
        "this is a Git LFS pointer, a short text in place of the weights",
        "Fetch the weights themselves with `git lfs pull`, or download the file from its page.",
    ),
    (
        b"<",
        "this is a web page saved under the model's name",
        "The download needs a login or an accepted licence: sign in on the model's page, then download again.",
    ),
    (
        b"{",
        "this is a JSON text, not weights",
        "A server's error message may have been saved in the model's place: download the file again.",
    ),
    (
        b"gguf",
        "this is a GGUF file",
        "Load it with Unet Loader (GGUF) of the ComfyUI-GGUF "
        "pack, if its version knows Ideogram 4, and put the quality node behind it; or use a .safetensors file.",
    ),
    (b"pk\x03\x04", "this is a PyTorch pickle (.pt, .ckpt, .bin)", _USE_SAFETENSORS),
    # torch.save writes protocol 2, other tools any up to 5.
    *(
        (b"\x80" + bytes([protocol]), "this is a Python pickle (.pt, .ckpt, .bin)", _USE_SAFETENSORS)
        for protocol in range(2, 6)
    ),
)
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor. `dtype` is safetensors' name for it, such as "BF16" or "F8_E4M3"."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """The headers of one model's files, merged."""

    paths: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]

    @property
    def file(self) -> Path:
        """The file to name in a message."""
        return self.paths[0]


def read_header(paths: Path | Sequence[Path]) -> Header:
    """Reads the headers of one safetensors file or of all shards of a model.

    Raises:
        CheckpointError: a file is absent, empty, cut short or no safetensors file, or a tensor is in two shards.
    """
    files = (paths,) if isinstance(paths, Path) else tuple(paths)
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for file in files:
        found, about = _read_one(file)
        for key in found.keys() & tensors.keys():
            raise CheckpointError(
                file, "another part of the model holds this tensor too", "Keep the parts of one version.", key
            )
        tensors.update(found)
        metadata = {**about, **metadata}
    return Header(files, tensors, metadata)


def _read_one(file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    # os.path's, since pathlib's raise where a name is longer than the file system allows.
    if not os.path.isfile(file):
        problem = "this is a folder" if os.path.isdir(file) else "there is no such file"
        raise CheckpointError(file, problem, "Choose the transformer's .safetensors file.")
    try:
        with safe_open(str(file), framework="pt") as opened:
            tensors = {}
            for key in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                piece = opened.get_slice(key)
                tensors[key] = TensorInfo(piece.get_dtype(), tuple(piece.get_shape()))
            return tensors, dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise _explain(file, error) from error


def _explain(file: Path, error: Exception) -> CheckpointError:
    """What the file is, from its size and first bytes, now that it is known not to be a whole safetensors file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            first = opened.read(64)
            # Layout of a safetensors file: 8 bytes little-endian length of the JSON header, the header, the data.
            length = int.from_bytes(first[:8], "little")
            opened.seek(8)
            header = opened.read(length) if length <= _LONGEST_HEADER else b""
    except OSError as refusal:
        return CheckpointError(file, f"it cannot be read ({refusal.strerror})", "Make it readable, then try again.")
    if size == 0:
        return CheckpointError(file, "the file is empty", _DOWNLOAD_AGAIN)
    # Only then the other formats: a header's length may begin with any of their first bytes, but none of them, read
    # as a length, is below the limit and has a brace behind it.
    if not header.startswith(b"{"):
        for magic, problem, advice in _OTHER_FORMATS:
            if first.lstrip().lower().startswith(magic) or first.startswith(magic):
                return CheckpointError(file, problem, advice)
        if first[8:9] or length > _LONGEST_HEADER:
            return CheckpointError(file, f"this is no safetensors file ({error})", _USE_SAFETENSORS)
    if 8 + length > size:
        return CheckpointError(file, "the file is cut short within its header", _DOWNLOAD_AGAIN)
    data = _data_bytes(header)
    if data is None:
        return CheckpointError(file, f"the safetensors header is damaged ({error})", _DOWNLOAD_AGAIN)
    expected = 8 + length + data
    if size < expected:
        return CheckpointError(file, f"the file is cut short: {size:,} of {expected:,} bytes", _DOWNLOAD_AGAIN)
    return CheckpointError(file, f"the file is damaged ({error})", _DOWNLOAD_AGAIN)


def _data_bytes(header: bytes) -> int | None:
    """Where the last tensor of a header ends; None where the header does not say."""
    try:
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        ends = [entry["data_offsets"][1] for entry in tensors]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return max(ends) if ends and all(type(end) is int for end in ends) else None
