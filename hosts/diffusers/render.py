"""One render at one quality."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch

from ...comparison.report import Render
from ...fusion.fusion import OFF, Fusion
from .blocks import HOST
from .conditioning import Conditioning
from .load import Models
from .pipeline import EncodedPipeline, encoded_pipeline
from .settings import Settings

# The first step proves the chains beside stock, the second is the first to run the kernels alone; where they are
# interpreted, there is nothing to get warm.
_WARM_UP_STEPS, _INTERPRETED_WARM_UP_STEPS = 2, 1

_INTERPRETED = "the kernels were interpreted on the CPU: these times say nothing about a GPU"


@dataclass(frozen=True)
class Rendering:
    """What a render gave.

    Attributes:
        image: [1, H, W, 3] float32 in 0..1, on the CPU.
        latents: [1, I, channels] float32, before decoding, on the CPU.
        sigmas: the noise levels that the scheduler visited, 0 at last.
        render: its quality, what was mounted, and what it cost; times in seconds.
    """

    image: torch.Tensor
    latents: torch.Tensor
    sigmas: tuple[float, ...]
    render: Render


class Renderer:
    """Renders at one quality.

    Args:
        models: the loaded checkpoint; left as it is between two renders.
        conditioning: the encoded prompt of `settings`.
        settings: what to render.
        quality: `off`, `lossless` or `high`.
    """

    def __init__(self, models: Models, conditioning: Conditioning, settings: Settings, quality: str) -> None:
        self.models = models
        self.settings = settings
        self.quality = quality
        self.device: torch.device = models.transformer.device
        self.fusion = None if quality == OFF else Fusion(quality, HOST, self.device)
        self.pipeline = encoded_pipeline(models, conditioning, self.fusion)

    @property
    def status(self) -> str:
        """What is mounted, in one line; on both transformers where there are two."""
        if self.fusion is None:
            return "stock"
        status = self.fusion.status(self.models.transformer)
        if self.models.unconditional is None:
            return status
        return f"{status}; unconditional: {self.fusion.status(self.models.unconditional)}"

    @property
    def unfused_reason(self) -> str | None:
        """Why a render that asked for fusion runs stock; None where it does not, or did not ask."""
        return None if self.fusion is None else self.fusion.unfused_reason(self.models.transformer)

    def warm_up(self) -> None:
        """A short render whose result is thrown away: it compiles the kernels and proves the chains.

        On a GPU it decodes as well, where the first decoding of a size takes longer than the second.
        """
        preset = self.settings.preset
        on_gpu = self.device.type == "cuda"
        steps = min(_WARM_UP_STEPS if on_gpu else _INTERPRETED_WARM_UP_STEPS, preset.steps)
        short = dataclasses.replace(preset, steps=steps, guidance=preset.guidance[:steps])
        self._denoise(dataclasses.replace(self.settings, preset=short), decode=on_gpu)

    def render(self) -> Rendering:
        """The whole preset; the time covers denoising and decoding, not the encoding of the prompt."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        start = self._now()
        image, latents, times = self._denoise(self.settings, decode=True)
        end = self._now()
        return Rendering(
            image.permute(0, 2, 3, 1).cpu(),
            latents.cpu(),
            tuple(self.pipeline.scheduler.sigmas.tolist()),
            Render(
                quality=self.quality,
                status=self.status,
                seconds_per_step=[b - a for a, b in zip([start, *times], times, strict=False)],
                total_seconds=end - start,
                peak_memory_bytes=self._peak_memory(),
                note=_INTERPRETED if self.fusion is not None and self.device.type == "cpu" else None,
            ),
        )

    def _denoise(self, settings: Settings, decode: bool) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
        """The picture [1, 3, H, W] in 0..1 or, not decoded, latents; the last latents; and when each step ended."""
        preset = settings.preset
        times: list[float] = []
        latents: list[torch.Tensor] = []

        def after_step(_: EncodedPipeline, step: int, __: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
            times.append(self._now())
            if step == preset.steps - 1:
                latents.append(tensors["latents"])
            return {}

        image = self.pipeline(
            settings.prompt,
            height=settings.height,
            width=settings.width,
            num_inference_steps=preset.steps,
            guidance_schedule=list(preset.guidance),
            mu=preset.mu,
            std=preset.std,
            max_sequence_length=self.pipeline.conditioning.text_tokens,
            latents=self._noise(settings),
            output_type="pt" if decode else "latent",
            callback_on_step_end=after_step,
        ).images
        return image, latents[0], times

    def _noise(self, settings: Settings) -> torch.Tensor:
        """[1, I, channels] float32, drawn on the CPU so that every device starts from the same."""
        rows, columns = settings.grid
        generator = torch.Generator("cpu").manual_seed(settings.seed)
        return torch.randn(1, rows * columns, self.models.transformer.config.in_channels, generator=generator)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _peak_memory(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
