"""A folder's tokenizer as core asks for one: the prompt in its own chat template, token for token the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy import sd1_clip
from comfy.text_encoders.ideogram4 import Ideogram4Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ...checkpoint.errors import CheckpointError
from ...checkpoint.text_encoder import TextDimensions
from ...kernels.memory import is_out_of_memory
from .text_encoder import ENCODER

_START = "<|im_start|>"  # a text that begins so is in a template already
_LONGEST = 99_999_999
_ADVICE = "Put the tokenizer/ of the same checkpoint there, with its chat template."


def tokenizer_class(folder: Path, dims: TextDimensions) -> type[Ideogram4Tokenizer]:
    """The class of tokenizer that core makes a CLIP with.

    Args:
        folder: tokenizer/.
        dims: of the text encoder.

    Raises:
        CheckpointError: transformers cannot load it, it has no chat template, or more tokens than the text encoder.
    """
    tokenizer = _load(folder)
    last = max(tokenizer.get_vocab().values(), default=0)
    if last >= dims.vocab_size:
        raise CheckpointError(
            folder, f"its last token is {last:,}, the text encoder has {dims.vocab_size:,} of them", _ADVICE
        )

    class Tokens(sd1_clip.SDTokenizer):  # type: ignore[misc]
        def __init__(self, tokenizer_data: Any = None, **_: Any) -> None:
            super().__init__(
                folder,
                max_length=_LONGEST,
                min_length=1,
                pad_with_end=False,
                pad_to_max_length=False,
                has_start_token=False,
                has_end_token=False,
                pad_token=tokenizer.pad_token_id,
                embedding_size=dims.hidden_size,
                embedding_key=ENCODER,
                tokenizer_class=_Verbatim,
                tokenizer_data=tokenizer_data or {},
            )

    class Tokenizer(Ideogram4Tokenizer):  # type: ignore[misc]
        def __init__(self, tokenizer_data: Any = None, **_: Any) -> None:
            sd1_clip.SD1Tokenizer.__init__(self, tokenizer_data=tokenizer_data or {}, name=ENCODER, tokenizer=Tokens)

        def tokenize_with_weights(
            self, text: str, return_word_ids: bool = False, llama_template: str | None = None, **kwargs: Any
        ) -> Any:
            if llama_template is None and not text.startswith(_START):
                text, llama_template = _in_template(tokenizer, text), "{}"
            return super().tokenize_with_weights(text, return_word_ids, llama_template, **kwargs)

    return Tokenizer


class _Verbatim:
    """A tokenizer that adds no tokens of its own: the template has them all."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, folder: Path) -> _Verbatim:
        return cls(_load(folder))

    def __call__(self, text: str) -> Any:
        return self._tokenizer(text, add_special_tokens=False)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _load(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not _in_template(tokenizer, "a"):
            raise ValueError("its chat template makes nothing of the prompt")
    except Exception as error:  # transformers, tokenizers and Jinja share no base class
        if is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(folder, f"the tokenizer cannot be loaded ({reason})", _ADVICE) from error
    return tokenizer


def _in_template(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The whole text for the encoder. A message of parts, as diffusers' `Ideogram4Pipeline` writes it."""
    message = {"role": "user", "content": [{"type": "text", "text": text}]}
    return str(tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False))
