"""The prompt as the transformer sees it: encoded once, before the transformer takes the memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import Ideogram4Pipeline
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import QWEN3_VL_ACTIVATION_LAYERS
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, Qwen3VLConfig, Qwen3VLModel

from ...checkpoint.convert import dequantise_row_wise
from ...checkpoint.folder import CheckpointFolder, model_file
from ...checkpoint.header import read_header
from ...checkpoint.quantisation import is_row_wise
from ...checkpoint.shards import find_shards
from .load import read_tensors, reading, refuse_missing
from .settings import Settings, SettingsError

# Chat template included. Source: SGLang's max_text_tokens and diffusers' max_sequence_length, both 2048.
MAX_TEXT_TOKENS = 2048


@dataclass(frozen=True)
class Conditioning:
    """What `Ideogram4Pipeline.encode_prompt` returns for one prompt, of T text and then I image tokens, unpadded.

    Attributes:
        features: [1, T + I, features] float32, zero on image tokens.
        position_ids: [1, T + I, 3] int64, the (t, h, w) that MRoPE rotates by.
        segment_ids: [1, T + I] int64.
        indicator: [1, T + I] int64, text or image.
        text_tokens: T.
    """

    features: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor
    indicator: torch.Tensor
    text_tokens: int


@torch.no_grad()
def encode(
    folder: CheckpointFolder, settings: Settings, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Conditioning:
    """Encodes the prompt with the checkpoint's text encoder in `dtype`, which is gone when this returns.

    Raises:
        CheckpointError: tokenizer or text encoder cannot be loaded.
        SettingsError: the prompt is too long.
    """
    with reading(folder.tokenizer, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer, local_files_only=True)
        tokens = _count_tokens(tokenizer, settings.prompt)
    if tokens > MAX_TEXT_TOKENS:
        raise SettingsError(f"the prompt has {tokens:,} tokens, Ideogram 4 takes at most {MAX_TEXT_TOKENS:,}")
    pipeline = Ideogram4Pipeline(
        scheduler=None,
        vae=None,
        text_encoder=load_text_encoder(folder, device, dtype),
        tokenizer=tokenizer,
        transformer=None,
        unconditional_transformer=None,
    )
    rows, columns = settings.grid
    # Some of its config, such as an epsilon or the rope, is only put to use here.
    with reading(folder.text_encoder, "text encoder"):
        features, position_ids, segment_ids, indicator = pipeline.encode_prompt(
            settings.prompt, rows, columns, tokens, device
        )
    return Conditioning(features, position_ids, segment_ids, indicator, tokens)


def load_text_encoder(
    folder: CheckpointFolder, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Qwen3VLModel:
    """Qwen3-VL in `dtype` on `device`, from plain weights or from official row-wise fp8.

    Raises:
        CheckpointError: the folder holds no such model, or not all of its language model.
    """
    header = read_header(find_shards(model_file(folder.text_encoder)))
    options = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
    row_wise = is_row_wise(header)
    with reading(folder.text_encoder, "text encoder"):
        # Not Qwen3VLConfig's own from_pretrained: where there is no config.json, that gives the 8B model's.
        config = AutoConfig.from_pretrained(folder.text_encoder, local_files_only=True)
        if not isinstance(config, Qwen3VLConfig):
            raise ValueError(f"config.json describes a {config.model_type}, not a qwen3_vl")
        layers, needed = config.text_config.num_hidden_layers, QWEN3_VL_ACTIVATION_LAYERS[-1] + 1
        if layers < needed:
            raise ValueError(f"config.json says {layers} layers, Ideogram 4 takes features of {needed}")
        if row_wise:
            weights = dequantise_row_wise(read_tensors(header, torch.device("cpu")))
            model, report = Qwen3VLModel.from_pretrained(None, config=config, state_dict=weights, **options)
        else:
            model, report = Qwen3VLModel.from_pretrained(folder.text_encoder, **options)
    missing = [name for name in report["missing_keys"] if name.startswith("language_model.")]
    refuse_missing(folder.text_encoder, "language model", missing)
    return model.to(device).eval().requires_grad_(False)


def _count_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str) -> int:
    message = {"role": "user", "content": [{"type": "text", "text": prompt}]}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    if tokens == 0:
        raise ValueError("its chat template makes nothing of the prompt")
    return tokens
