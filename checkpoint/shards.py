"""The files of one model that is stored in several."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from .errors import CheckpointError

_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.[^.]+)")
_INDEX = "*.safetensors.index.json"


def find_shards(path: Path) -> tuple[Path, ...]:
    """All files of the model that `path` belongs to: itself, or those that an index beside it names with it, or every
    `NAME-0000i-of-0000n` beside it.

    Raises:
        CheckpointError: a shard is missing.
    """
    names = _named_by_index(path) or _named_alike(path)
    shards = tuple(path.with_name(name) for name in names)
    for shard in shards:
        if len(shards) > 1 and not os.path.exists(shard):
            raise CheckpointError(
                path,
                f"the model has {len(shards)} parts and {shard.name} is missing",
                f"Download all {len(shards)} parts into {path.parent}.",
            )
    return shards


def _named_alike(path: Path) -> list[str]:
    match = _SHARD.fullmatch(path.name)
    if match is None or not 1 <= int(match["index"]) <= int(match["count"]):
        return [path.name]
    count = int(match["count"])
    return [f"{match['stem']}-{i:05d}-of-{count:05d}{match['suffix']}" for i in range(1, count + 1)]


def _named_by_index(path: Path) -> list[str]:
    """The files of the index that names `path`, in order; [] where none does.

    An index that cannot be read may belong to another model of the folder: the files' names then decide.
    """
    for index in sorted(path.parent.glob(_INDEX)):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue
        if path.name in names and all(isinstance(name, str) and Path(name).name == name for name in names):
            return sorted(names)
    return []
