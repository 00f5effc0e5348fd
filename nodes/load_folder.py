"""Load Ideogram 4 Folder: a checkpoint's folder -> MODEL, CLIP and VAE, and what was found."""

from __future__ import annotations

from comfy_api.latest import io
from typing_extensions import override

from ..hosts.comfyui.folder import find_folder, folder_names, load_folder
from ..hosts.comfyui.row_wise import AUTO, CHOICES
from .inputs import CATEGORY


class LoadIdeogram4Folder(io.ComfyNode):
    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Ideogram4Fusion_LoadFolder",
            display_name="Load Ideogram 4 Folder",
            category=CATEGORY,
            description="Loads a whole Ideogram 4 checkpoint as its repository publishes it, a folder that holds "
            "transformer, text_encoder, tokenizer and vae. Nothing has to be converted, and each part may have any "
            "size: all of them are read from the files. A folder that lacks something is refused with the reason.",
            search_aliases=["ideogram", "diffusers", "checkpoint loader", "hugging face", "repository"],
            inputs=[
                io.Combo.Input(
                    "folder", options=folder_names(), tooltip="A folder of models/diffusers, at any depth up to four."
                ),
                io.Boolean.Input(
                    "load_unconditional",
                    default=False,
                    tooltip="Whether to load unconditional_transformer too, as large as the transformer: for the "
                    "presets that guide (DEFAULT_20, QUALITY_48, TURBO_12). INSTANT_8 and FAST_20 need none.",
                ),
                io.Combo.Input(
                    "row_wise_weights",
                    options=list(CHOICES),
                    default=AUTO,
                    optional=True,
                    advanced=True,
                    tooltip="Of transformers in row-wise fp8: bf16 takes 19 GB and is fastest at off and lossless; fp8 "
                    "keeps the file's 9 GB, is dequantised in each step, and is fastest at high, which multiplies it "
                    "as it is; auto is bf16 where that fits. At off and lossless the picture is the same.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="For the quality node and the presets."),
                io.Clip.Output(tooltip="For CLIP Text Encode. Its text taps are raw, as the reference takes them."),
                io.Vae.Output(tooltip="For VAE Decode."),
                io.String.Output("found", display_name="found", tooltip="What the folder holds, a line for each part."),
                io.Model.Output(
                    "unconditional_model",
                    display_name="unconditional_model",
                    tooltip="For the presets that guide; empty unless load_unconditional is on.",
                ),
            ],
        )

    @classmethod
    @override
    def execute(cls, folder: str, load_unconditional: bool, row_wise_weights: str = AUTO) -> io.NodeOutput:
        loaded = load_folder(find_folder(folder), row_wise_weights, load_unconditional)
        return io.NodeOutput(loaded.model, loaded.clip, loaded.vae, loaded.found, loaded.unconditional)
