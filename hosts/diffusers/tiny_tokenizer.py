"""A tokenizer for the tiny checkpoint: byte-level BPE under Qwen3-VL's chat template."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .default_prompt import DEFAULT_PROMPT

VOCABULARY_SIZE = 512

_START, _END, _PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

# What Qwen3-VL-8B-Instruct's template gives for text alone, messages as a string or as a list of parts.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END, chat_template=_CHAT_TEMPLATE
    )
