"""The config.json beside a file, and the transformer's, which its metadata may hold too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .header import Header

_CLASS_NAME = "Ideogram4Transformer2DModel"


def find_config(path: Path) -> dict[str, Any] | None:
    """The `config.json` in the folder of `path`; None where there is none or it describes another model.

    Raises:
        CheckpointError: there is one that is no JSON text in UTF-8.
    """
    config = read_config(path.parent)
    return None if config is None else _ours(config)


def read_config(folder: Path) -> Any:
    """What the `config.json` of a folder holds, of any model; None where there is none.

    Raises:
        CheckpointError: there is one that is no JSON text in UTF-8.
    """
    file = folder / "config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            file,
            f"this is no JSON text in UTF-8 ({error})",
            "Download it again, or remove it if it does not belong to the model beside it.",
        ) from error


def config_in_metadata(header: Header) -> dict[str, Any] | None:
    """The same, from the JSON text that safetensors metadata may hold under "config".

    Raises:
        CheckpointError: a JSON object begins there and cannot be read.
    """
    text = header.metadata.get("config", "")
    if not text.lstrip().startswith("{"):
        return None  # the key is everybody's: another tool may keep a file's name there
    try:
        return _ours(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            header.file, f"the config in its metadata cannot be read ({error})", "Download the file again."
        ) from error


def _ours(config: Any) -> dict[str, Any] | None:
    if not isinstance(config, dict):
        return None
    known = config.get("_class_name") == _CLASS_NAME or {"llm_features_dim", "mrope_section"} <= config.keys()
    return config if known else None
