"""Two renders that differ in quality alone, compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from ...checkpoint.folder import open_folder
from ...comparison.environment import describe_environment
from ...comparison.metrics import compare, compare_latents
from ...comparison.pictures import difference, side_by_side
from ...comparison.report import Report
from ...sampling.schedule import size_note
from .conditioning import encode
from .load import load_models
from .render import Renderer, Rendering
from .settings import Settings


@dataclass(frozen=True)
class Comparison:
    """The report and its pictures, float32 [1, rows, columns, 3] in 0..1 on the CPU."""

    report: Report
    side_by_side: torch.Tensor
    difference: torch.Tensor


def compare_qualities(
    root: Path,
    settings: Settings,
    qualities: tuple[str, str],
    device: torch.device,
    progress: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Renders `settings` at both qualities, from the same noise and conditioning, one after the other.

    Args:
        root: a checkpoint folder in the official layout.
        settings: what to render.
        qualities: of A and of B: `off`, `lossless` or `high`.
        device: where to.
        progress: is given a line before each part of the work.

    Raises:
        CheckpointError: the folder, or a part of it, cannot be used.
        SettingsError: the prompt is too long.
    """
    folder = open_folder(root, settings.preset.needs_unconditional)
    progress("encoding the prompt")
    conditioning = encode(folder, settings, device)
    progress("loading the transformer")
    models = load_models(folder, device)
    renderings: list[Rendering] = []
    unfused: list[str] = []
    for quality in qualities:
        renderer = Renderer(models, conditioning, settings, quality)
        progress(f"{quality}: warming up")
        renderer.warm_up()
        progress(f"{quality}: rendering {settings.preset.name}")
        renderings.append(renderer.render())
        if reason := renderer.unfused_reason:
            unfused.append(reason)
    a, b = renderings
    report = Report(
        a=a.render,
        b=b.render,
        metrics=compare(a.image, b.image),
        preset=settings.preset.name,
        width=settings.width,
        height=settings.height,
        seed=settings.seed,
        sigmas=a.sigmas,
        environment={
            **describe_environment(device),
            "diffusers": metadata.version("diffusers"),
            "transformers": metadata.version("transformers"),
            "checkpoint": models.checkpoint.describe(),
        },
        latents=compare_latents(a.latents, b.latents),
        size_note=size_note(settings.width, settings.height),
        nothing_fused=unfused[0] if unfused else None,
    )
    return Comparison(
        report,
        side_by_side(a.image, b.image, f"A: {a.render.quality}", f"B: {b.render.quality}"),
        difference(a.image, b.image)[0],
    )
