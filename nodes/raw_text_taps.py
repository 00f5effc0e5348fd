"""Ideogram 4 Raw Text Taps: a CLIP whose text features are those that the reference takes."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from typing_extensions import override

from ..hosts.comfyui.text_encoder import with_raw_taps
from .inputs import CATEGORY


class Ideogram4RawTextTaps(io.ComfyNode):
    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Ideogram4Fusion_RawTextTaps",
            display_name="Ideogram 4 Raw Text Taps",
            category=CATEGORY,
            description="Ideogram 4 reads 13 layers of Qwen3-VL before their norm. ComfyUI 0.33 norms the last one "
            "where the text encoder's file holds the vision tower. Put this between Load CLIP and CLIP Text Encode to "
            "take it raw; where ComfyUI is right already it changes nothing, and says so.",
            search_aliases=["ideogram", "clip", "text encoder", "qwen3-vl"],
            inputs=[io.Clip.Input("clip", tooltip="From Load CLIP, type ideogram4.")],
            outputs=[
                io.Clip.Output(tooltip="For CLIP Text Encode. The input goes on generating text."),
                io.String.Output("taps", display_name="taps", tooltip="What was done, in words."),
            ],
        )

    @classmethod
    @override
    def execute(cls, clip: Any) -> io.NodeOutput:
        return io.NodeOutput(*with_raw_taps(clip))
