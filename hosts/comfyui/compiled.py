"""Whether core compiles a model for a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy.patcher_extension import WrappersMP

# Of core's own wrapper (`comfy_api/torch_helpers/torch_compile.py`), whose module would import all of comfy_api.
KEY = "torch.compile"


def compiled(transformer_options: Mapping[str, Any]) -> bool:
    """Whether core's torch.compile wrapper is among the options of a call."""
    return KEY in transformer_options.get("wrappers", {}).get(WrappersMP.APPLY_MODEL, {})
