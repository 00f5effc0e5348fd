"""Ideogram 4 Fusion: ComfyUI calls `comfy_entrypoint`; nothing else is imported until it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .nodes import FusionExtension


async def comfy_entrypoint() -> FusionExtension:
    """The pack's nodes, for ComfyUI's loader."""
    from .nodes import FusionExtension

    return FusionExtension()
