"""Inputs that several nodes share, so that they read the same everywhere."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..fusion.fusion import QUALITIES
from ..fusion.pieces import ALL, ATTENTIONS
from ..sampling.presets import PRESETS

CATEGORY = "Ideogram 4 Fusion"

_QUALITY_PROMISE = (
    "off: the stock model. lossless: fused kernels, each proven byte-equal to the stock model on this machine, so the "
    "image is the same. high: faster still, and close: the advanced inputs of the quality node name its pieces."
)


def model_input() -> Any:
    return io.Model.Input("model", tooltip="An Ideogram 4 model; for INSTANT_8 and FAST_20 the fal one made for it.")


def positive_input() -> Any:
    return io.Conditioning.Input(
        "positive",
        tooltip="The prompt, encoded by CLIP Text Encode with type ideogram4. Feed a JSON caption from a text node: "
        "the editor takes braces typed into CLIP Text Encode for choices.",
    )


def latent_input() -> Any:
    return io.Latent.Input(
        "latent_image", tooltip="An empty Flux 2 latent; its size sets the size of the image and shapes the schedule."
    )


def preset_input() -> Any:
    lines = [f"{p.name}: {p.steps} steps, made for {p.checkpoint}" for p in PRESETS.values()]
    return io.Combo.Input(
        "preset",
        options=list(PRESETS),
        default=next(iter(PRESETS)),
        tooltip="Steps, schedule and guidance. " + "; ".join(lines) + ".",
    )


def unconditional_input() -> Any:
    return io.Model.Input(
        "unconditional_model",
        optional=True,
        tooltip="The unconditional Ideogram 4 model, for the presets that guide (DEFAULT_20, QUALITY_48, TURBO_12). "
        "INSTANT_8 and FAST_20 need none and ignore it.",
    )


def preset_status_output() -> Any:
    return io.String.Output(
        "status",
        display_name="status",
        tooltip="The checkpoint that the preset is made for, and a warning where a connected model is not used.",
    )


def seed_input() -> Any:
    return io.Int.Input(
        "seed",
        default=0,
        min=0,
        max=0xFFFFFFFFFFFFFFFF,
        control_after_generate=True,
        tooltip="Seed of the noise.",
    )


def piece_inputs() -> list[Any]:
    """The pieces of `high`. Optional, so that graphs made before there were any still run."""
    return [
        io.Combo.Input(
            "attention",
            options=list(ATTENTIONS),
            default=ALL.attention,
            optional=True,
            advanced=True,
            tooltip="high: auto takes cuDNN's attention on GPUs where it was measured to be faster, cudnn takes it "
            "wherever it runs, stock keeps ComfyUI's. An attention that another node chose is kept.",
        ),
        io.Boolean.Input(
            "fast_accumulation",
            default=ALL.fast_accumulation,
            optional=True,
            advanced=True,
            tooltip="high: fp8 products that add up with fewer bits.",
        ),
        io.Boolean.Input(
            "row_wise_fp8",
            default=ALL.row_wise_fp8,
            optional=True,
            advanced=True,
            tooltip="high: the official checkpoint, kept in fp8 by Load Ideogram 4, is multiplied in fp8 instead of "
            "being dequantised in each step.",
        ),
        io.Boolean.Input(
            "unproven_chains",
            default=ALL.unproven_chains,
            optional=True,
            advanced=True,
            tooltip="high: fused kernels also where they are not byte-equal to the stock model on this machine.",
        ),
    ]


def quality_input(name: str, default: str, what: str) -> Any:
    return io.Combo.Input(name, options=list(QUALITIES), default=default, tooltip=f"{what} {_QUALITY_PROMISE}")
