"""The transformer's config.json, as diffusers writes it, beside the file or in its metadata."""

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
    file = path.with_name("config.json")
    try:
        return _ours(json.loads(file.read_text(encoding="utf-8-sig")))
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
