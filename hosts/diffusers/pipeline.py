"""diffusers' own pipeline around a conditioning that is there already and around fused transformers."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Ideogram4Pipeline, Ideogram4Transformer2DModel
from torch import nn

from ...fusion.fusion import Fusion
from .conditioning import Conditioning
from .load import Models


class FusedTransformer(nn.Module):
    """A transformer of which every forward is fused; to a pipeline, the transformer itself."""

    def __init__(self, transformer: Ideogram4Transformer2DModel, fusion: Fusion) -> None:
        super().__init__()
        self.transformer = transformer
        self.fusion = fusion

    @property
    def config(self) -> Any:
        return self.transformer.config

    @property
    def dtype(self) -> torch.dtype:
        return self.transformer.dtype

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fusion.run(self.transformer, lambda: self.transformer(*args, **kwargs))


class NoTransformer(nn.Module):
    """Stands in for the unconditional transformer where guidance is 1: the pipeline then weights its output with 0."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype = dtype
        self.device = device

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        """Zero velocity, of the shape and dtype of `hidden_states` [B, I, channels]."""
        return (torch.zeros_like(hidden_states),)


class EncodedPipeline(Ideogram4Pipeline):
    """`Ideogram4Pipeline` that takes any `prompt` for the one it was given encoded."""

    conditioning: Conditioning

    def encode_prompt(self, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        encoded = self.conditioning
        return encoded.features, encoded.position_ids, encoded.segment_ids, encoded.indicator


def encoded_pipeline(models: Models, conditioning: Conditioning, fusion: Fusion | None) -> EncodedPipeline:
    """The pipeline for one conditioning, its transformers fused unless `fusion` is None."""

    def fused(transformer: Ideogram4Transformer2DModel) -> nn.Module:
        return transformer if fusion is None else FusedTransformer(transformer, fusion)

    transformer, unconditional = models.transformer, models.unconditional
    pipeline = EncodedPipeline(
        # Its default shift of 1 hands the preset's noise levels on as they are.
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=models.vae,
        text_encoder=None,
        tokenizer=None,
        transformer=fused(transformer),
        unconditional_transformer=(
            NoTransformer(transformer.dtype, transformer.device) if unconditional is None else fused(unconditional)
        ),
    )
    pipeline.conditioning = conditioning
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
