"""Quantised formats that a file may have and this pack does not read, each refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .errors import CheckpointError
from .header import Header, TensorInfo

_CORE_LOADS_IT = "ComfyUI's own Load Diffusion Model node loads this file."
_ALTERNATIVES = "Use the official fp8 file, ideogram4_fp8_scaled.safetensors of Comfy-Org/Ideogram-4, or a bf16 file."

# Companions of a bitsandbytes 4-bit weight.
_BITSANDBYTES = (".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")

# What ComfyUI stores such weights in, where no format is spelled out in the metadata.
_COMFY_STORAGE = {"U8": "nvfp4", "I8": "int8", "F8_E5M2": "float8_e5m2"}


def quantised_layers(header: Header, prefix: str) -> dict[str, str]:
    """Modules that the file marks as quantised for ComfyUI -> format, "" where only the tensor's bytes say which.

    The mark is a `comfy_quant` tensor beside the weight, or the metadata's `_quantization_metadata`, JSON of
    {"layers": {module: {"format": ...}}}.

    Raises:
        CheckpointError: that metadata cannot be read.
    """
    layers = {
        name.removesuffix(".comfy_quant").removeprefix(prefix): ""
        for name in header.tensors
        if name.startswith(prefix) and name.endswith(".comfy_quant")
    }
    text = header.metadata.get("_quantization_metadata")
    if text is None:
        return layers
    try:
        entries = json.loads(text)["layers"]
        return layers | {name.removeprefix(prefix): str(entry["format"]) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            header.file, f"its _quantization_metadata cannot be read ({error!r})", _ALTERNATIVES
        ) from error


def refuse_other_quantisations(file: Path, tensors: Mapping[str, TensorInfo], layers: Mapping[str, str]) -> None:
    """Raises for every quantised format but e4m3 with scales.

    Args:
        file: the file to name.
        tensors: its tensors, prefix stripped.
        layers: what `quantised_layers` found.

    Raises:
        CheckpointError: bitsandbytes, nvfp4, mxfp8, int8 and other integer or e5m2 weights.
    """
    for name in tensors:
        if name.endswith(_BITSANDBYTES):
            raise CheckpointError(
                file,
                "it is packed by bitsandbytes (NF4), which ComfyUI's Ideogram 4 model cannot compute with",
                _ALTERNATIVES,
                name,
            )
    for module, form in layers.items():
        if form not in ("", "float8_e4m3fn"):
            raise CheckpointError(file, f"it is quantised as {form}", _CORE_LOADS_IT, f"{module}.weight")
    for name, info in tensors.items():
        if not name.endswith(".weight") or info.dtype in ("BF16", "F16", "F32", "F64"):
            continue
        module = name.removesuffix(".weight")
        scale = tensors.get(f"{module}.weight_scale")
        if info.dtype == "F8_E4M3":
            # mxfp8 stores e4m3 too; its scales are exponents, one a block.
            if module in layers and scale is not None and scale.dtype in ("U8", "F8_E8M0"):
                raise CheckpointError(file, "it is quantised as mxfp8", _CORE_LOADS_IT, name)
        elif module in layers:
            form = _COMFY_STORAGE.get(info.dtype, info.dtype)
            raise CheckpointError(file, f"it is quantised as {form} for ComfyUI", _CORE_LOADS_IT, name)
        else:
            raise CheckpointError(
                file, f"its weights are packed as {info.dtype} by a tool unknown here", _ALTERNATIVES, name
            )
