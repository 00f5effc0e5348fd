"""Files that are no Ideogram 4 transformer, told apart by their keys so that the message can say what they are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NoReturn

from .errors import CheckpointError
from .header import Header

# What it is, a key that only it has, what to do with it. In this order: a LoRA's keys contain its target's.
_STRANGERS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    (
        "a LoRA",
        re.compile(r"\.lora_(A|B|a|b)\.|\.lora_(down|up)\.|^(lora_unet|lora_transformer|lycoris)_|\.(hada|lokr)_w\d"),
        "Load the transformer here and put the LoRA on it with a LoRA loader node.",
    ),
    (
        "a VAE",
        re.compile(r"(^|\.)(encoder|decoder)\.conv_in\.weight$"),
        "Load it with the Load VAE node; here goes the transformer.",
    ),
    (
        "a text encoder",
        # Not any self_attn: some transformers of other image models have it too.
        re.compile(
            r"(^|\.)(embed_tokens|token_embedding)\.weight$|^shared\.weight$"
            r"|^(model\.|language_model\.)+layers\.\d+\.self_attn\.q_proj\.weight$"
        ),
        "Load it with the Load CLIP node, type ideogram4; here goes the transformer.",
    ),
)
CHOOSE_A_TRANSFORMER = (
    "Choose an Ideogram 4 transformer, such as ideogram4_fp8_scaled.safetensors of Comfy-Org/Ideogram-4."
)


def refuse_stranger(header: Header, missing: Iterable[str]) -> NoReturn:
    """Raises with the best name there is for the file.

    Args:
        header: the file.
        missing: the tensors of an Ideogram 4 transformer that it lacks.

    Raises:
        CheckpointError: always.
    """
    # An all-in-one checkpoint of another model holds a VAE and a text encoder beside its transformer.
    all_in_one = any(name.startswith("model.diffusion_model.") for name in header.tensors)
    for kind, pattern, advice in () if all_in_one else _STRANGERS:
        key = next((name for name in header.tensors if pattern.search(name)), None)
        if key is not None:
            raise CheckpointError(header.file, f"this is {kind}, no Ideogram 4 transformer", advice, key)
    raise CheckpointError(
        header.file, f"this is no Ideogram 4 transformer: it lacks {', '.join(missing)}", CHOOSE_A_TRANSFORMER
    )
