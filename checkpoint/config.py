"""The transformer's config.json, as diffusers writes it, beside the file or in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CLASS_NAME = "Ideogram4Transformer2DModel"


def find_config(path: Path) -> dict[str, Any] | None:
    """The `config.json` in the folder of `path`; None where there is none or it describes another model."""
    try:
        text = path.with_name("config.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return _parse(text)


def config_in_metadata(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """The same, from the JSON text that safetensors metadata may hold under "config"."""
    return _parse(metadata.get("config", ""))


def _parse(text: str) -> dict[str, Any] | None:
    try:
        config = json.loads(text)
    except ValueError:
        return None
    if not isinstance(config, dict):
        return None
    known = config.get("_class_name") == _CLASS_NAME or {"llm_features_dim", "mrope_section"} <= config.keys()
    return config if known else None
