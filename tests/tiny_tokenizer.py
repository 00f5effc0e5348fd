"""A tokenizer for the tiny checkpoint: byte-level BPE under Qwen3-VL's chat template."""

from __future__ import annotations

from ideogram4_fusion.demo_model.tokenizer import CHAT_TEMPLATE
from ideogram4_fusion.hosts.diffusers.default_prompt import DEFAULT_PROMPT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 512

_START, _END, _PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Takes any text, one token a byte at worst; its merges are those of the default prompt, which it shortens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[_PAD, _START, _END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([DEFAULT_PROMPT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END, chat_template=CHAT_TEMPLATE
    )
