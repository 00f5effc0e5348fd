"""Compare Fusion Quality: two qualities from one seed, side by side, with a verdict."""

from __future__ import annotations

import math

from comfy.model_patcher import ModelPatcher
from comfy.sd import VAE
from comfy_api.latest import io
from typing_extensions import override

from ..comparison.report import text
from ..hosts.comfyui.comparison import compare_qualities
from ..hosts.comfyui.sampling import Conditioning, Latent, find_preset, preset_status
from .inputs import (
    CATEGORY,
    latent_input,
    model_input,
    positive_input,
    preset_input,
    quality_input,
    seed_input,
    unconditional_input,
)
from .status_text import show_on

_VAE_TOOLTIP = "The Flux 2 VAE, which Ideogram 4 shares."


class CompareFusionQuality(io.ComfyNode):
    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Ideogram4Fusion_CompareQuality",
            display_name="Compare Fusion Quality",
            category=CATEGORY,
            description="Renders two fusion qualities with the same noise, sigmas and prompt, one after the other, and "
            "reports whether the images are identical, how close they are (PSNR, SSIM), and what each took. It sets "
            "the quality of both sides itself. Each side is warmed up before it is timed.",
            search_aliases=["ideogram", "psnr", "ssim", "a/b", "benchmark", "difference"],
            is_output_node=True,
            not_idempotent=True,
            inputs=[
                model_input(),
                positive_input(),
                latent_input(),
                io.Vae.Input("vae", tooltip=_VAE_TOOLTIP),
                preset_input(),
                seed_input(),
                quality_input("quality_a", "lossless", "Side A."),
                quality_input("quality_b", "high", "Side B."),
                unconditional_input(),
            ],
            outputs=[
                io.Image.Output("image_a", display_name="image_a"),
                io.Image.Output("image_b", display_name="image_b"),
                io.Image.Output("side_by_side", display_name="side_by_side", tooltip="With labels above the images."),
                io.Image.Output("difference", display_name="difference", tooltip="Amplified; the gain stands above."),
                io.String.Output("report", display_name="report", tooltip="The verdict first."),
                io.Float.Output(
                    "psnr",
                    display_name="psnr",
                    tooltip="In dB on RGB, peak 1; infinite for identical images, NaN where nothing was compared.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @override
    def execute(
        cls,
        model: ModelPatcher,
        positive: Conditioning,
        latent_image: Latent,
        vae: VAE,
        preset: str,
        seed: int,
        quality_a: str,
        quality_b: str,
        unconditional_model: ModelPatcher | None = None,
    ) -> io.NodeOutput:
        chosen = find_preset(preset)
        result = compare_qualities(
            model,
            positive,
            latent_image,
            vae,
            chosen,
            seed,
            (quality_a, quality_b),
            unconditional_model,
        )
        show_on(cls.hidden.unique_id)(result.report.verdict)
        compared = result.report.metrics.psnr_db is not None and result.report.nothing_fused is None
        return io.NodeOutput(
            result.image_a,
            result.image_b,
            result.side_by_side,
            result.difference,
            f"{text(result.report)}\n\n{preset_status(chosen, unconditional_model)}",
            result.report.metrics.psnr_db if compared else math.nan,
        )
