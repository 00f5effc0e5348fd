"""What ComfyUI's text encoder and VAE loaders give, small and deterministic. Imports nothing of the pack, so that a
server can load this file too."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

import nodes

FEATURES = 104  # llm_features_dim of the checkpoints that these stand in for


class StandInCLIP:
    """Encodes each word as random features that only the word decides, [1, words, FEATURES]."""

    def tokenize(self, text: str) -> list[str]:
        return text.split()

    def encode_from_tokens_scheduled(self, tokens: list[str]) -> list[Any]:
        return [[torch.stack([self._features(word) for word in tokens])[None], {"pooled_output": None}]]

    @staticmethod
    def _features(word: str) -> torch.Tensor:
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
        return torch.randn(FEATURES, generator=torch.Generator().manual_seed(seed))


class StandInVAE:
    """Shows three of the latent's channels, 16 times as large: [B, 128, h, w] -> [B, 16 h, 16 w, 3] in 0..1."""

    def decode(self, samples: torch.Tensor) -> torch.Tensor:
        images = torch.nn.functional.interpolate(samples[:, :3].float(), scale_factor=16, mode="bilinear")
        return images.sigmoid().movedim(1, -1)


class StandInCLIPLoader(nodes.CLIPLoader):
    """core's own inputs, so that what validates here validates there."""

    def load_clip(self, clip_name: str, type: str = "stable_diffusion", device: str = "default") -> tuple[StandInCLIP]:
        return (StandInCLIP(),)


class StandInVAELoader(nodes.VAELoader):
    def load_vae(self, vae_name: str) -> tuple[StandInVAE]:
        return (StandInVAE(),)


STAND_INS = {"CLIPLoader": StandInCLIPLoader, "VAELoader": StandInVAELoader}
