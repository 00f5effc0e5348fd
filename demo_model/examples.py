"""What the transformer is trained on: posters and captions as latents and text features, computed once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

import torch
from diffusers import AutoencoderKLFlux2
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, Qwen3VLModel

from .autoencoder import TOKEN, latents
from .captions import random_caption
from .drawing import draw, error_weights
from .posters import SIDE, Poster, random_poster
from .text_encoder import FEATURES, text_features, tokenise
from .transformer import Examples

_HELD_OUT_SEED = 20_000
_ROOM = 8  # sequences are padded to a multiple of it, which kernels run best at
_TOKENS = (SIDE // 16) ** 2


@dataclass(frozen=True)
class Captioned:
    """A poster and what it is called."""

    poster: Poster
    caption: str


def held_out(count: int = 200) -> list[Captioned]:
    """What the model is measured with: the same in every call."""
    return _random(Random(_HELD_OUT_SEED), count, ())


def training_set(count: int, seed: int) -> list[Captioned]:
    """`count` posters, none with a word of those that are held out."""
    return _random(Random(seed), count, {each.poster.word.letters for each in held_out()})


def cache_examples(
    captioned: Sequence[Captioned],
    rows: Tensor,
    autoencoder: AutoencoderKLFlux2,
    encoder: Qwen3VLModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: int = 256,
) -> Examples:
    """Encodes every poster and caption.

    Args:
        captioned: the posters.
        rows: the same, as `drawing.as_rows` gives them, on the device to compute and keep them on.
        autoencoder, encoder, tokenizer: as a host loads them from the checkpoint's folder.
        batch: how many at once.
    """
    device = rows.device
    ids = tokenise(tokenizer, [each.caption for each in captioned])
    length = -(-max(map(len, ids)) // _ROOM) * _ROOM
    count = len(ids)
    features = torch.empty(count, length, FEATURES, dtype=torch.bfloat16, device=device)
    tokens = torch.empty(count, _TOKENS, TOKEN, dtype=torch.bfloat16, device=device)
    weights = torch.empty(count, _TOKENS, dtype=torch.bfloat16, device=device)
    for start in range(0, count, batch):
        part = slice(start, start + batch)
        features[part] = text_features(encoder, ids[part], length)
        tokens[part] = latents(autoencoder, draw(rows[part]))
        weights[part] = functional.avg_pool2d(error_weights(rows[part]), 16).flatten(1)
    lengths = torch.tensor([len(each) for each in ids], device=device)
    return Examples(features, lengths, tokens, weights / weights.float().mean())


def _random(random: Random, count: int, without: Collection[str]) -> list[Captioned]:
    posters = (random_poster(random, without) for _ in range(count))
    return [Captioned(poster, random_caption(poster, random)) for poster in posters]
