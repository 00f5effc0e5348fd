"""The tokenizer: one token for a number, for a capital letter, for each word and each run of punctuation of captions.

Short sequences of whole values are what a model this small can learn from in minutes. Any other text comes to one token
a byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .captions import random_caption
from .posters import random_poster

LARGEST_NUMBER = 1000  # of a bbox
PREFIX, SUFFIX = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"

_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = (_PAD, _START, _END)

# A caption's words are looked for in this many of them; every template comes up many times over.
_CAPTIONS = 4000

# What stands between the values of a caption, the longest first.
_PUNCTUATION = (
    '{"high_level_description":"',
    '","compositional_deconstruction":{"background":"',
    '{"compositional_deconstruction":{"background":"',
    '","elements":[',
    '{"type":"obj",',
    '{"type":"text",',
    '"bbox":[',
    '"text":"',
    '"desc":"',
    '"}]}}',
    '"},',
    "],",
    '",',
)

# Qwen3-VL's chat template as far as text alone goes, messages as a string or as a list of parts.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, the same in every call."""
    splitting = _splitting()
    vocabulary = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary += sorted(_pieces(splitting) - set(vocabulary))
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[], ignore_merges=True)
    )
    # A caption means the same however it is indented.
    tokenizer.normalizer = normalizers.Replace(Regex(r"(?<=[{\[:,])\s+|\s+(?=[}\]])"), "")
    tokenizer.pre_tokenizer = splitting
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END, chat_template=CHAT_TEMPLATE, padding_side="left"
    )


def _splitting() -> pre_tokenizers.PreTokenizer:
    """Into punctuation, numbers, lower-case words with the space before them, and single characters."""
    punctuation = "|".join(_escaped(text) for text in sorted(_PUNCTUATION, key=len, reverse=True))
    pattern = Regex(rf"{punctuation}|\d+| ?[A-Z]?[a-z]+|[\s\S]")
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in "{}[]" else character for character in text)


def _pieces(splitting: pre_tokenizers.PreTokenizer) -> set[str]:
    """Everything that deserves a token of its own, in the alphabet that stands for bytes."""
    random = Random(0)
    captions = (random_caption(random_poster(random), random) for _ in range(_CAPTIONS))
    texts: Iterable[str] = (PREFIX, SUFFIX, *map(str, range(LARGEST_NUMBER + 1)), *captions)
    return {piece for text in texts for piece, _ in splitting.pre_tokenize_str(text)} - set(_SPECIAL)
