"""Quantised formats that a file may have: which are ComfyUI's to compute with, and the others, each refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import torch
from safetensors import safe_open

from .errors import CheckpointError
from .header import Header, TensorInfo

_CORE_LOADS_IT = "ComfyUI's own Load Diffusion Model node loads this file."
_ALTERNATIVES = "Use the official fp8 file, ideogram4_fp8_scaled.safetensors of Comfy-Org/Ideogram-4, or a bf16 file."

_DOWNLOAD_AGAIN = "Download the file again."

# What ComfyUI's formats that the pack hands on to it are stored in.
FORMATS = {"F8_E4M3": "float8_e4m3fn", "U8": "nvfp4", "I8": "int8_tensorwise"}

# Companions of a bitsandbytes 4-bit weight.
BITSANDBYTES = (".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")


def fp8_mark(**more: bool) -> torch.Tensor:
    """ComfyUI's mark of an fp8 weight, as the `comfy_quant` tensor beside it: JSON of its format and `more`, uint8."""
    return torch.tensor(list(json.dumps({"format": FORMATS["F8_E4M3"], **more}).encode()), dtype=torch.uint8)


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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            header.file, f"its _quantization_metadata cannot be read ({error!r})", _ALTERNATIVES
        ) from error


def refuse_other_quantisations(file: Path, tensors: Mapping[str, TensorInfo], layers: Mapping[str, str]) -> None:
    """Raises for every quantised format but e4m3 with scales, and ComfyUI's nvfp4 and int8.

    Args:
        file: the file to name.
        tensors: its tensors, prefix stripped.
        layers: what `quantised_layers` found.

    Raises:
        CheckpointError: bitsandbytes, mxfp8, e5m2 and other weights, or metadata that names another format than the
            one that a weight is stored in.
    """
    for name in tensors:
        if name.endswith(BITSANDBYTES):
            raise CheckpointError(
                file,
                "it is packed by bitsandbytes (NF4), which ComfyUI's Ideogram 4 model cannot compute with",
                _ALTERNATIVES,
                name,
            )
    for module, form in layers.items():
        weight = tensors.get(f"{module}.weight")
        if form and form not in FORMATS.values():
            raise CheckpointError(file, f"it is quantised as {form}", _CORE_LOADS_IT, f"{module}.weight")
        if form and weight is not None and FORMATS.get(weight.dtype) != form:
            raise CheckpointError(
                file, f"its metadata says {form} of a weight in {weight.dtype}", _ALTERNATIVES, f"{module}.weight"
            )
    for name, info in tensors.items():
        if not name.endswith(".weight") or info.dtype in ("BF16", "F16", "F32", "F64"):
            continue
        module = name.removesuffix(".weight")
        scale = tensors.get(f"{module}.weight_scale")
        if info.dtype == "F8_E4M3":
            # mxfp8 stores e4m3 too; its scales are exponents, one a block.
            if module in layers and scale is not None and scale.dtype in ("U8", "F8_E8M0"):
                raise CheckpointError(file, "it is quantised as mxfp8", _CORE_LOADS_IT, name)
        elif module in layers and info.dtype not in FORMATS:
            raise CheckpointError(file, f"it is quantised as {info.dtype} for ComfyUI", _CORE_LOADS_IT, name)
        elif module not in layers:
            raise CheckpointError(
                file, f"its weights are packed as {info.dtype} by a tool unknown here", _ALTERNATIVES, name
            )


def check_marks(header: Header, prefix: str) -> None:
    """Reads the `comfy_quant` tensors of a file of ComfyUI's: each is JSON of {"format": ...}, as its weight is stored.

    Raises:
        CheckpointError: one says another format, by which ComfyUI would misread the weight, or cannot be read.
    """
    for path in header.paths:
        with safe_open(str(path), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                if not (name.startswith(prefix) and name.endswith(".comfy_quant")):
                    continue
                weight = header.tensors.get(f"{name.removesuffix('.comfy_quant')}.weight")
                expected = FORMATS.get("" if weight is None else weight.dtype)
                if header.tensors[name].dtype not in ("U8", "I8"):  # core takes its bytes by way of numpy
                    raise CheckpointError(
                        path,
                        f"the mark of a {expected} weight is stored as {header.tensors[name].dtype}",
                        "Use the file that it was made from.",
                        name,
                    )
                form = _format(opened.get_tensor(name))
                if form != expected:
                    says = "cannot be read" if form is None else f"says {shortened(form)}"
                    raise CheckpointError(
                        path, f"the mark of a {expected} weight {says}", "Use the file that it was made from.", name
                    )


def _format(mark: torch.Tensor) -> Any:
    try:
        return json.loads(bytes(mark.flatten().view(torch.uint8).tolist()))["format"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def is_row_wise(header: Header) -> bool:
    """Whether a model's weights are row-wise fp8: [out, in], each with a weight_scale [out]; for text encoders.

    Raises:
        CheckpointError: an fp8 weight has no such scale, or a scale no such weight.
    """
    scaled = False
    for name, info in header.tensors.items():
        if name.endswith(".weight_scale"):
            weight = header.tensors.get(name.removesuffix("_scale"))
            if weight is None or not weight.dtype.startswith("F8_"):
                raise CheckpointError(header.file, "a scale without its fp8 weight", _DOWNLOAD_AGAIN, name)
        elif info.dtype.startswith("F8_"):
            scale = header.tensors.get(f"{name}_scale")
            if scale is None or len(info.shape) != 2 or scale.shape != info.shape[:1]:
                found = "none" if scale is None else f"one of shape {list(scale.shape)}"
                raise CheckpointError(
                    header.file,
                    f"an fp8 weight {list(info.shape)} needs a weight_scale with a value for each row and has {found}",
                    _DOWNLOAD_AGAIN,
                    name,
                )
            scaled = True
    return scaled
