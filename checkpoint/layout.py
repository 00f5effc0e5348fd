"""Which of the published layouts a file has: key prefix, attention names, how the weights are stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .errors import CheckpointError
from .header import Header, TensorInfo
from .quantisation import FORMATS, quantised_layers, refuse_other_quantisations
from .strangers import CHOOSE_A_TRANSFORMER, refuse_stranger

# Tensors that together no other published model has.
FINGERPRINT = ("embed_image_indicator.weight", "layers.0.adaln_modulation.weight", "llm_cond_norm.weight")

# "" official and Comfy-Org; "model.diffusion_model." ComfyUI's own saves; the others are exporters' habits.
PREFIXES = (
    *("", "model.diffusion_model.", "diffusion_model.", "transformer.", "model."),
    *("conditional_transformer.", "unconditional_transformer."),
)

FUSED_PARTS = ("qkv", "o")
SPLIT_PARTS = ("to_q", "to_k", "to_v", "to_out.0")

# Beside a block's attention, a JSON text in uint8: the attention that ComfyUI (newer than 0.33) is to take for it.
ATTENTION_CONFIG = "attention.comfy_attention.config"

Naming = Literal["fused", "split"]
Weights = Literal["plain", "fp8_row_wise", "fp8_scaled", "comfy_mixed"]

_DTYPE_WORDS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


@dataclass(frozen=True)
class Layout:
    """How a file spells an Ideogram 4 transformer.

    Attributes:
        prefix: what stands before every name.
        naming: "fused" has attention.qkv and .o; "split" has attention.to_q, .to_k, .to_v and .to_out.0.
        weights: "plain"; "fp8_row_wise" (official: e4m3 weight [O, I] with F32 weight_scale [O]); "fp8_scaled"
            (Comfy-Org: e4m3 weight with one scalar scale, for ComfyUI's quantised operations); "comfy_mixed" (the same
            with nvfp4 or int8 weights among or instead of them).
        dtype: safetensors' name of the dtype that most parameters have.
        scale: the companion of an fp8 weight that holds its scale: "weight_scale", or "scale_weight" in the older
            form of "fp8_scaled", which a `scaled_fp8` tensor marks; None for plain weights.
        formats: of "comfy_mixed": ComfyUI's names of the formats in it.
    """

    prefix: str
    naming: Naming
    weights: Weights
    dtype: str
    scale: str | None
    formats: tuple[str, ...] = ()

    def describe(self) -> str:
        """Such as "official row-wise fp8, fused qkv"."""
        weights = {
            "plain": f"{_DTYPE_WORDS.get(self.dtype, self.dtype)} weights",
            "fp8_row_wise": "official row-wise fp8",
            "fp8_scaled": "ComfyUI per-tensor fp8",
            "comfy_mixed": f"ComfyUI {' and '.join(self.formats)}",
        }[self.weights]
        return f"{weights}, {'fused qkv' if self.naming == 'fused' else 'split q, k, v'}"


def identify(header: Header) -> Layout:
    """The layout of a file, from its header.

    Raises:
        CheckpointError: it holds something else than one Ideogram 4 transformer, or holds it in a layout that the
            pack does not read.
    """
    prefix = _prefix(header)
    tensors = {name.removeprefix(prefix): info for name, info in header.tensors.items() if name.startswith(prefix)}
    missing = [name for name in FINGERPRINT if name not in tensors]
    if missing:
        refuse_stranger(header, missing)
    layers = quantised_layers(header, prefix)
    refuse_other_quantisations(header.file, tensors, layers)
    naming = _naming(header, tensors)
    weights, scale = _weights(header, tensors, layers)
    formats = tuple(sorted({FORMATS[info.dtype] for name, info in tensors.items() if _is_mixed(name, info, layers)}))
    if formats:
        if weights == "fp8_row_wise":
            raise CheckpointError(
                header.file, "it mixes row-wise fp8 with ComfyUI's own formats", "Use a file quantised one way."
            )
        formats = (*formats, *(("fp8",) if weights == "fp8_scaled" else ()))
        weights, scale = "comfy_mixed", "weight_scale"
    if weights in ("fp8_scaled", "comfy_mixed") and naming == "split":
        raise CheckpointError(
            header.file,
            "quantised for ComfyUI with split q, k, v: three scales cannot become the one that a fused qkv has",
            "Use ideogram4_fp8_scaled.safetensors of Comfy-Org/Ideogram-4, or a bf16 file.",
            "layers.0.attention.to_q.weight",
        )
    dtypes: Counter[str] = Counter()
    for info in tensors.values():
        dtypes[info.dtype] += math.prod(info.shape)
    return Layout(prefix, naming, weights, dtypes.most_common(1)[0][0], scale, formats)


def _is_mixed(name: str, info: TensorInfo, layers: Mapping[str, str]) -> bool:
    """Whether a tensor is a weight in a format that is ComfyUI's alone."""
    return info.dtype in ("U8", "I8") and name.endswith(".weight") and name.removesuffix(".weight") in layers


def _prefix(header: Header) -> str:
    found = [prefix for prefix in PREFIXES if prefix + FINGERPRINT[0] in header.tensors]
    if not found:
        for name in header.tensors:
            if name.endswith("." + FINGERPRINT[0]):
                raise CheckpointError(
                    header.file,
                    f"its tensors' names begin with {name.removesuffix(FINGERPRINT[0])!r}, which is not known here",
                    CHOOSE_A_TRANSFORMER,
                    name,
                )
        refuse_stranger(header, FINGERPRINT)
    if len(found) > 1:
        raise CheckpointError(
            header.file,
            f"it holds {len(found)} transformers, under {' and '.join(map(repr, found))}",
            "Choose a file with one: conditional and unconditional model are published as two files.",
            found[1] + FINGERPRINT[0],
        )
    return found[0]


def _naming(header: Header, tensors: Iterable[str]) -> Naming:
    first: dict[Naming, str] = {}
    for name in tensors:
        _, attention, part = name.partition(".attention.")
        if not attention or not name.startswith("layers."):
            continue
        part = part.rpartition(".")[0]
        if part in FUSED_PARTS:
            first.setdefault("fused", name)
        elif part in SPLIT_PARTS:
            first.setdefault("split", name)
    if len(first) == 2:
        raise CheckpointError(
            header.file,
            f"it mixes two spellings of attention, {first['fused']} and {first['split']}",
            "A conversion or merge has gone wrong: use the file it was made from.",
            first["split"],
        )
    if not first:
        raise CheckpointError(
            header.file,
            "no layer has attention weights",
            "Use a complete transformer file.",
            "layers.0.attention.qkv.weight",
        )
    return next(iter(first))


def _weights(header: Header, tensors: dict[str, TensorInfo], layers: dict[str, str]) -> tuple[Weights, str | None]:
    """How the fp8 weights are scaled: all of them one way, or the file is refused."""
    scale = "scale_weight" if "scaled_fp8" in tensors else "weight_scale"
    first: dict[Weights, str] = {}
    for name, info in tensors.items():
        if info.dtype != "F8_E4M3" or not name.endswith(".weight"):
            continue
        module = name.removesuffix(".weight")
        companion = tensors.get(f"{module}.{scale}")
        if companion is None:
            raise CheckpointError(
                header.file,
                f"an fp8 weight without its {scale}",
                "If the file was cast straight to fp8, ComfyUI's Load Diffusion Model node loads it; if a tool has "
                "dropped the scales, only noise would come out: use the official file or a bf16 one.",
                name,
            )
        if companion.shape in ((), (1,)):
            first.setdefault("fp8_scaled", name)
            if scale == "weight_scale" and module not in layers:
                raise CheckpointError(
                    header.file,
                    "a per-tensor fp8 weight without comfy_quant, which tells ComfyUI how to compute with it",
                    "Use ideogram4_fp8_scaled.safetensors of Comfy-Org/Ideogram-4.",
                    f"{module}.comfy_quant",
                )
        elif companion.shape == info.shape[:1] and scale == "weight_scale":
            first.setdefault("fp8_row_wise", name)
        else:
            raise CheckpointError(
                header.file,
                f"an fp8 weight {list(info.shape)} with a scale {list(companion.shape)}, neither [] for a tensor nor "
                f"{list(info.shape[:1])} for its rows",
                "Use the official fp8 file, ideogram4_fp8_scaled.safetensors of Comfy-Org/Ideogram-4, or a bf16 file.",
                f"{module}.{scale}",
            )
    if len(first) == 2:
        raise CheckpointError(
            header.file,
            f"it mixes per-tensor and row-wise fp8 ({first['fp8_scaled']} and {first['fp8_row_wise']})",
            "Use a file quantised one way.",
            first["fp8_row_wise"],
        )
    if not first:
        return "plain", None
    return next(iter(first)), scale
