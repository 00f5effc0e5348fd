"""A small Qwen3-VL that is never trained: its features tell which tokens there are, and roughly what preceded them.

Nearly everything in it is drawn at random. Only the embeddings of numbers are laid out by hand, so that a number's size
can be read off them as off a trained encoder's; without that the boxes of captions would be learnt a number at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from diffusers import Ideogram4Pipeline
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import QWEN3_VL_ACTIVATION_LAYERS
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen3VLConfig, Qwen3VLModel

from .tokenizer import LARGEST_NUMBER, PREFIX, SUFFIX

WIDTH = 64
TAPS = len(QWEN3_VL_ACTIVATION_LAYERS)  # layers whose outputs become the features of a text token
LAYERS = QWEN3_VL_ACTIVATION_LAYERS[-1] + 1
FEATURES = TAPS * WIDTH

_HEAD_SIZE = 16
_EMBEDDING = "language_model.embed_tokens.weight"
_WAVES = 12  # sines and as many cosines of a number
_LONGEST, _SHORTEST = 4000.0, 16.0  # their wavelengths: four times the range, four pixels of a poster


def text_config(vocabulary: int, width: int = WIDTH) -> Qwen3VLConfig:
    """The official encoder's shape but for the sizes: 36 layers, a vision tower that is never run."""
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": width,
            "intermediate_size": width,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": width // _HEAD_SIZE,
            "num_key_value_heads": 2,
            "head_dim": _HEAD_SIZE,
            "vocab_size": vocabulary,
            "max_position_embeddings": 4096,
            "rope_scaling": {
                "rope_type": "default",
                "rope_theta": 5_000_000,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": width,
            "deepstack_visual_indexes": [0],
        },
    )
    config.architectures = ["Qwen3VLModel"]
    return config


def random_weights(config: Qwen3VLConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, Tensor], list[str]]:
    """Every weight by name, float32 and the same in every call, and the names of the Linear modules among them."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = Qwen3VLModel(config)
    weights = {}
    for name, parameter in model.named_parameters():
        weight = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and name.endswith(".weight"):
            weight = torch.ones_like(weight)
        elif weight.ndim > 1 and name != _EMBEDDING:
            weight /= math.sqrt(math.prod(weight.shape[1:]))
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight /= math.sqrt(2 * LAYERS)  # all the branches together add about what the embedding holds
        weights[name] = weight
    _lay_out_numbers(weights[_EMBEDDING], tokenizer)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return weights, linears


def _lay_out_numbers(embedding: Tensor, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives each number waves of its value beside the part that all numbers share; every entry has variance 1.

    Source of the waves: the position encoding of Vaswani et al., Attention Is All You Need, 3.5.
    """
    values = torch.arange(LARGEST_NUMBER + 1, dtype=torch.float32)
    ids = tokenizer.convert_tokens_to_ids([str(int(value)) for value in values])
    lengths = torch.logspace(math.log10(_LONGEST), math.log10(_SHORTEST), _WAVES)
    phases = 2.0 * math.pi * values[:, None] / lengths
    shared = embedding[ids[0], 2 * _WAVES :].expand(len(values), -1)
    embedding[ids] = torch.cat([math.sqrt(2.0) * phases.sin(), math.sqrt(2.0) * phases.cos(), shared], 1)


def tokenise(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[list[int]]:
    """The token ids of each prompt within the chat template, as `Ideogram4Pipeline.encode_prompt` finds them."""
    texts = [PREFIX + prompt + SUFFIX for prompt in prompts]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


@torch.no_grad()
def text_features(encoder: Qwen3VLModel, ids: Sequence[Sequence[int]], length: int) -> Tensor:
    """`Ideogram4Pipeline.encode_prompt` for many prompts of `tokenise`: [N, length, FEATURES] bfloat16.

    Prompts are padded on the left to `length` tokens, with features of zero.
    """
    device = encoder.device
    tokens = torch.zeros(len(ids), length, dtype=torch.long)
    for row, prompt in zip(tokens, ids, strict=True):
        row[length - len(prompt) :] = torch.tensor(prompt)
    starts = length - torch.tensor([len(prompt) for prompt in ids], device=device)[:, None]
    places = torch.arange(length, device=device)[None] - starts
    there = places >= 0
    taps = Ideogram4Pipeline._get_text_encoder_hidden_states(
        encoder, tokens.to(device), there.long(), places.clamp(min=0)
    )
    features = torch.stack(taps, dim=-1).flatten(2)  # the tap is the faster index
    return features.masked_fill(~there[:, :, None], 0.0)
