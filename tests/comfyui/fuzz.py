"""Damaged checkpoints, as many as there is time for, through the loaders that the nodes call.

    COMFYUI_PATH=~/ComfyUI python -m ideogram4_fusion.tests.comfyui.fuzz --seconds 600 [--seed 0] [--folder FOLDER]

A damaged file must be refused in words, or loaded as what it says: every tensor of the model is held against the file,
read and dequantised here without the pack. Anything else is printed, with the file kept. A crash or a load of more than
a minute ends the process, and the file that it was at lies in the folder.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import os
import random
import re
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...checkpoint.errors import CheckpointError
from ..mutants import mutate, mutate_data
from ..tiny import StateDict, quantise_row_wise, quantise_scaled, split_names, tiny_config, tiny_state_dict, write_file

_HANG = 60  # seconds
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I64": torch.int64,
}


@dataclass
class Outcome:
    """How many files were refused and loaded, what the first words of the refusals were, and what went wrong."""

    refused: int = 0
    loaded: int = 0
    words: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """A file to damage, and how it is loaded: a function from the file to name -> tensor, as the model has them."""

    content: bytes
    file: Path
    load: Callable[[Path], Mapping[str, torch.Tensor]]
    read: Callable[[bytes], Mapping[str, torch.Tensor]]


def fuzz(parts: list[Part], seconds: float, seed: int, keep: Path, most: int | None = None) -> Outcome:
    """Damages the parts in turn until the time is over, or `most` files are through; files gone wrong go to `keep`."""
    rng, outcome, end = random.Random(seed), Outcome(), time.monotonic() + seconds
    number = 0
    while time.monotonic() < end and (most is None or number < most):
        part = rng.choice(parts)
        damage = mutate_data if rng.random() < 0.4 else mutate
        content = damage(part.content, rng)
        part.file.write_bytes(content)
        faulthandler.dump_traceback_later(_HANG, exit=True)
        problem = None
        try:
            with torch.inference_mode():
                problem = difference(part.load(part.file), part.read(content))
            outcome.loaded += 1
        except CheckpointError as error:
            outcome.refused += 1
            outcome.words[re.sub(r"[\d,]+", "#", str(error).partition(": ")[2].partition(" (")[0])[:48]] += 1
        except Exception as error:  # what else a loader raises is what is looked for
            problem = f"{type(error).__name__}: {error}"
        faulthandler.cancel_dump_traceback_later()
        if problem is not None:
            kept = keep / f"{part.file.parent.name}_{number}.safetensors"
            kept.write_bytes(content)
            outcome.wrong.append(f"{kept} (seed {seed}): {problem.splitlines()[0]}")
        part.file.write_bytes(part.content)
        number += 1
    return outcome


def difference(loaded: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> str | None:
    """What of a model is not what its file holds, up to the rounding of a dtype that core chose."""
    if loaded.keys() != stored.keys():
        return f"other tensors than in the file: {sorted(loaded.keys() ^ stored.keys())[:3]}"
    for name, tensor in loaded.items():
        one, other = tensor.double(), stored[name].double()
        if one.shape != other.shape:
            return f"{name} is {list(one.shape)}, in the file {list(other.shape)}"
        if not torch.allclose(one, other, rtol=2**-7, atol=1e-7, equal_nan=True):
            return f"{name} is not what the file holds"
    return None


def read_file(content: bytes) -> StateDict:
    """Every tensor of a file that safetensors has taken, fp8 dequantised; by hand."""
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    tensors: StateDict = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            data = bytearray(content[8 + size + start : 8 + size + end])
            tensor = torch.frombuffer(data, dtype=_DTYPES[entry["dtype"]]) if data else torch.zeros(0)
            tensors[name] = tensor.reshape(entry["shape"])
    plain: StateDict = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale")
        if scale is not None:
            tensor = tensor.bfloat16().float() * (scale[:, None].bfloat16() if scale.ndim else scale)
        if not name.endswith(("_scale", ".comfy_quant")):
            plain[name] = tensor
    return plain


def fused(tensors: Mapping[str, torch.Tensor]) -> StateDict:
    """diffusers' names to core's."""
    found: StateDict = {}
    for name, tensor in tensors.items():
        if ".attention.to_q." in name:
            thirds = [tensors[name.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")]
            found[name.replace("to_q", "qkv")] = torch.cat([third.double() for third in thirds])
        elif ".attention.to_k." not in name and ".attention.to_v." not in name:
            found[name.replace(".to_out.0.", ".o.")] = tensor
    return found


def values(module: torch.nn.Module) -> StateDict:
    """A module's parameters and buffers, dequantised."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {n: t.dequantize() if hasattr(t, "dequantize") and hasattr(t, "_qdata") else t for n, t in named.items()}


def transformers(folder: Path) -> list[Part]:
    """Four layouts of a transformer of one layer, the official one by both of its ways."""
    from ...hosts.comfyui.load import load_diffusion_model

    config = tiny_config(num_layers=1)
    weights = tiny_state_dict(config)
    row_wise = quantise_row_wise(weights)
    bf16 = {name: tensor.bfloat16() for name, tensor in weights.items()}
    parts = []
    for layout, tensors in {
        "plain": bf16,
        "row_wise": row_wise,
        "split": split_names(dict(row_wise)),
        "scaled": quantise_scaled(weights),
    }.items():
        file = write_file(folder / layout / "model.safetensors", tensors, config)
        for choice in ("bf16", "fp8") if layout in ("row_wise", "split") else ("bf16",):

            def load(file: Path, choice: str = choice) -> StateDict:
                return values(load_diffusion_model(file, choice).model.diffusion_model)

            parts.append(Part(file.read_bytes(), file, load, lambda content: fused(read_file(content))))
    return parts


def folder_parts(folder: Path) -> list[Part]:
    """The text encoder and the VAE of a tiny checkpoint."""
    from comfy.diffusers_convert import convert_vae_state_dict

    from ...hosts.comfyui.folder_text_encoder import load_text_encoder
    from ...hosts.comfyui.folder_vae import load_vae
    from ..tiny_checkpoint import write_tiny_checkpoint

    write_tiny_checkpoint(folder)
    text, vae = folder / "text_encoder" / "model.safetensors", folder / "vae" / "diffusion_pytorch_model.safetensors"

    def load_text(file: Path) -> StateDict:
        return values(load_text_encoder(file.parent, folder / "tokenizer").cond_stage_model.qwen3vl_8b.transformer)

    def read_text(content: bytes) -> StateDict:
        prefix, stored = "language_model.", read_file(content)
        names = [name for name in stored if name.startswith(prefix) and name != f"{prefix}norm.weight"]
        return {name.replace(prefix, "model."): stored[name] for name in names}

    def read_vae(content: bytes) -> StateDict:
        stored = {name: tensor for name, tensor in read_file(content).items() if "num_batches" not in name}
        for name in ("bn.running_mean", "bn.running_var"):
            stored[name] = stored[name].unflatten(0, (2, 2, -1)).permute(2, 0, 1).flatten()
        converted: StateDict = convert_vae_state_dict(stored)
        return converted

    def load_it(file: Path) -> StateDict:
        return {n: t for n, t in values(load_vae(file.parent).first_stage_model).items() if "num_batches" not in n}

    return [Part(text.read_bytes(), text, load_text, read_text), Part(vae.read_bytes(), vae, load_it, read_vae)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    from ...benchmarks.comfyui_process import start_comfyui

    start_comfyui(Path(os.environ["COMFYUI_PATH"]), on_gpu=False, dynamic=False)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="ideogram4-fuzz-"))
    keep = folder / "wrong"
    keep.mkdir(parents=True, exist_ok=True)
    parts = [*transformers(folder / "transformers"), *folder_parts(folder / "folder")]
    outcome = fuzz(parts, options.seconds, options.seed, keep)
    print(f"{outcome.refused:,} files refused, {outcome.loaded:,} loaded as what they hold, {len(outcome.wrong)} wrong")
    for words, count in outcome.words.most_common():
        print(f"{count:7,} {words}")
    for line in outcome.wrong:
        print(line)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
