"""Ideogram 4's text features as the reference takes them: every tapped layer of Qwen3-VL raw.

ComfyUI 0.33 norms the last of the thirteen taps where the text encoder's file holds the vision tower too: the class
that it then chooses keeps the final norm, which generating text needs, and the last tap is what leaves it. Reference:
diffusers' `pipeline_ideogram4.py` takes the outputs of layers 0, 3, ..., 33 and 35 before any norm.
"""

from __future__ import annotations

import torch
from comfy.sd import CLIP
from comfy.text_encoders.ideogram4 import IDEOGRAM4_TAP_LAYERS

ENCODER = "qwen3vl_8b"  # core's name for Ideogram 4's text encoder, whatever its size
_NORM = f"{ENCODER}.transformer.model.norm"
_FORWARD = f"{_NORM}.forward"


class NoTextEncoder(ValueError):
    """A CLIP that is not Ideogram 4's text encoder, in one sentence."""


def with_raw_taps(clip: CLIP) -> tuple[CLIP, str]:
    """A CLIP whose last tap is not normed, and a line that says what was done.

    Where ComfyUI takes it raw already the CLIP is handed on as it is. Else the norm is patched away on a clone, for the
    length of its own calls: the CLIP itself goes on generating text.

    Raises:
        NoTextEncoder: `clip` was not loaded as Ideogram 4's text encoder.
    """
    encoder = getattr(getattr(clip, "cond_stage_model", None), ENCODER, None)
    model = getattr(getattr(encoder, "transformer", None), "model", None)
    # Other models read the same encoder, each at layers of its own.
    if getattr(encoder, "layer", None) != IDEOGRAM4_TAP_LAYERS or not hasattr(model, "norm"):
        raise NoTextEncoder(
            "this CLIP is not Ideogram 4's text encoder: load a Qwen3-VL 8B with Load CLIP, type ideogram4"
        )
    if clip.patcher.get_model_object(_NORM) is None or _FORWARD in clip.patcher.object_patches:
        return clip, "the last of the 13 taps is raw, as in the reference: nothing to do"
    raw = clip.clone()
    # Its forward, and not the module: a LoRA may patch the norm's weight, and a saved encoder must have it.
    raw.patcher.add_object_patch(_FORWARD, _as_it_is)
    return raw, "the last of the 13 taps came out normed: taken raw on this output, as in the reference"


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x
