"""A folder's text encoder and tokenizer -> core's CLIP, out of core's own Qwen3 classes at the file's sizes.

core's Load CLIP knows the 8B's sizes alone, and not Hugging Face's names. The taps come out raw, as the reference
takes them: the norm behind the last layer is not built, nor are the vision tower and the head, which only generating
text needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from comfy import sd1_clip
from comfy.model_patcher import ModelPatcher
from comfy.sd import CLIP
from comfy.supported_models_base import ClipTarget
from comfy.text_encoders.ideogram4 import IDEOGRAM4_TAP_LAYERS, Ideogram4TEModel
from comfy.text_encoders.llama import BaseLlama, BaseQwen3, Llama2_, Qwen3VL_8BConfig

from ...checkpoint.convert import StateDict, strip_prefix
from ...checkpoint.text_encoder import TextDimensions, inspect_text_encoder
from ...checkpoint.values import refuse_bad_values, refuse_empty_end
from .folder_tokenizer import tokenizer_class
from .loaded import refuse_half_loaded
from .row_wise import adopt, marked
from .text_encoder import ENCODER

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def load_text_encoder(folder: Path, tokenizer: Path, disable_dynamic: bool = False) -> CLIP:
    """The CLIP whose conditioning the transformer of the same checkpoint takes.

    Row-wise fp8 stays as it is and is dequantised for the length of each Linear's call, to the reference's numbers.

    Args:
        folder: text_encoder/, a Qwen3-VL of any size in Hugging Face's names.
        tokenizer: tokenizer/, anything that transformers' AutoTokenizer reads, with a chat template.
        disable_dynamic: for core, which asks for a copy without dynamic VRAM through `cached_patcher_init`.

    Raises:
        CheckpointError: either cannot be loaded, or not all of it fits core's Qwen3.
    """
    found = inspect_text_encoder(folder)
    make_tokenizer = tokenizer_class(tokenizer, found.dimensions)
    state_dict: StateDict = {}
    for file in found.header.paths:
        state_dict.update(comfy.utils.load_torch_file(str(file)))
    state_dict = strip_prefix(state_dict, found.prefix)
    state_dict.pop("norm.weight", None)
    refuse_empty_end(found.header.paths)
    refuse_bad_values(found.header.file, state_dict)

    options: dict[str, Any] = {
        "dtype": _DTYPES[found.dtype],
        # Off the GPU until it is needed: `adopt` below exchanges its weights.
        "initial_device": comfy.model_management.text_encoder_offload_device(),
    }
    if found.row_wise:
        state_dict = marked(state_dict)
        options |= {"quantization_metadata": {"mixed_ops": True}, "dtype": torch.bfloat16}
    given = {f"model.{name}": tensor for name, tensor in state_dict.items()}
    names = set(given)
    clip = CLIP(
        ClipTarget(make_tokenizer, _encoder_class(found.dimensions)),
        parameters=comfy.utils.calculate_parameters(given),
        state_dict=[given],
        model_options=options,
        disable_dynamic=disable_dynamic,
    )
    refuse_half_loaded(found.header.file, clip.cond_stage_model.qwen3vl_8b.transformer, names)
    adopt(clip.cond_stage_model)
    clip.patcher.cached_patcher_init = (_load_patcher, (folder, tokenizer))
    return clip


def _load_patcher(folder: Path, tokenizer: Path, disable_dynamic: bool = False) -> ModelPatcher:
    return load_text_encoder(folder, tokenizer, disable_dynamic).patcher


def _encoder_class(dims: TextDimensions) -> type[Ideogram4TEModel]:
    # core's config declares its sizes as fields and these two as attributes of the class.
    config = type("Config", (Qwen3VL_8BConfig,), {"head_dim": dims.head_dim, "rope_dims": list(dims.mrope_section)})

    class Language(BaseLlama, BaseQwen3, torch.nn.Module):  # type: ignore[misc]
        def __init__(self, config_dict: dict[str, Any], dtype: Any, device: Any, operations: Any) -> None:
            super().__init__()
            settings = config(**config_dict)
            self.num_layers = settings.num_hidden_layers
            self.dtype = dtype
            self.model = Llama2_(settings, device=device, dtype=dtype, ops=operations)

    class Taps(sd1_clip.SDClipModel):  # type: ignore[misc]
        def __init__(self, device: Any = "cpu", dtype: Any = None, model_options: Any = None, **_: Any) -> None:
            super().__init__(
                device=device,
                dtype=dtype,
                layer=IDEOGRAM4_TAP_LAYERS,
                textmodel_json_config={
                    "vocab_size": dims.vocab_size,
                    "hidden_size": dims.hidden_size,
                    "intermediate_size": dims.intermediate_size,
                    "num_hidden_layers": dims.num_hidden_layers,
                    "num_attention_heads": dims.num_attention_heads,
                    "num_key_value_heads": dims.num_key_value_heads,
                    "rope_theta": dims.rope_theta,
                    "rms_norm_eps": dims.rms_norm_eps,
                    "final_norm": False,
                    "lm_head": False,
                },
                special_tokens={},  # a pad token in the text would hide what follows it; nothing is padded here
                layer_norm_hidden_state=False,
                model_class=Language,
                enable_attention_masks=True,
                return_attention_masks=True,
                model_options=model_options or {},
            )

    class Encoder(Ideogram4TEModel):  # type: ignore[misc]
        def __init__(self, device: Any = "cpu", dtype: Any = None, model_options: Any = None) -> None:
            sd1_clip.SD1ClipModel.__init__(
                self, device=device, dtype=dtype, name=ENCODER, clip_model=Taps, model_options=model_options or {}
            )

    return Encoder
