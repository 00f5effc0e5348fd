"""The pack's nodes. Their ids and the names of their inputs are saved in workflows and never change."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io
from typing_extensions import override

from .compare_quality import CompareFusionQuality
from .fusion_quality import FusionQuality
from .load_folder import LoadIdeogram4Folder
from .load_lora import LoadIdeogram4Lora
from .load_model import LoadIdeogram4
from .preset import Ideogram4Preset
from .raw_text_taps import Ideogram4RawTextTaps
from .sampler import Ideogram4Sampler


class FusionExtension(ComfyExtension):
    @override
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            LoadIdeogram4,
            LoadIdeogram4Folder,
            LoadIdeogram4Lora,
            Ideogram4RawTextTaps,
            FusionQuality,
            Ideogram4Preset,
            Ideogram4Sampler,
            CompareFusionQuality,
        ]
