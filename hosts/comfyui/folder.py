"""A checkpoint's folder as its repository publishes it -> everything that a graph needs of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import folder_paths
from comfy.model_patcher import ModelPatcher
from comfy.sd import CLIP, VAE

from ...checkpoint.errors import CheckpointError
from ...checkpoint.folder import open_folder
from ...checkpoint.inspection import inspect_checkpoint
from ...checkpoint.text_encoder import inspect_text_encoder
from ...checkpoint.vae import inspect_vae
from .folder_text_encoder import load_text_encoder
from .folder_vae import load_vae
from .load import describe_file, load_diffusion_model, settle_row_wise

FOLDER = "diffusers"  # core's name for models/diffusers

_PARTS = ("transformer", "text_encoder")
_DEEPEST = 4  # models--owner--name/snapshots/commit of a Hugging Face cache is 3


@dataclass(frozen=True)
class Loaded:
    """The parts of a folder; `unconditional` is None unless it was asked for, `found` says a line of each."""

    model: ModelPatcher
    clip: CLIP
    vae: VAE
    unconditional: ModelPatcher | None
    found: str


def folder_names() -> list[str]:
    """Every checkpoint below models/diffusers, as its path below it; to open one, `find_folder`."""
    return sorted({found.as_posix() for base in folder_paths.get_folder_paths(FOLDER) for found in _below(Path(base))})


def find_folder(name: str) -> Path:
    """The checkpoint that `folder_names` listed under that name.

    Raises:
        CheckpointError: it has gone since.
    """
    for base in folder_paths.get_folder_paths(FOLDER):
        found = Path(base) / name
        if found.is_dir():
            return found
    raise CheckpointError(Path(name), "there is no such folder in models/diffusers", "Refresh the node's list.")


def load_folder(root: Path, row_wise_weights: str, with_unconditional: bool = False) -> Loaded:
    """Loads transformer, text encoder, tokenizer and VAE, and the unconditional transformer if asked for.

    All of them are looked at before the first is loaded, so that a folder that lacks something says so at once.

    Args:
        root: the folder that holds transformer/, text_encoder/, tokenizer/ and vae/.
        row_wise_weights: of the transformers, as of `load.load_diffusion_model`; the text encoder's stay as they are.
        with_unconditional: whether to load unconditional_transformer/ too.

    Raises:
        CheckpointError: a part is absent, incomplete, in a layout that the pack does not read, or not made for the
            others.
    """
    folder = open_folder(root, with_unconditional)
    text, vae = inspect_text_encoder(folder.text_encoder), inspect_vae(folder.vae)
    files = [folder.transformer, *([] if folder.unconditional is None else [folder.unconditional])]
    for file in files:
        dimensions = inspect_checkpoint(file).dimensions
        for made, taken, of in (
            (text.dimensions.features, dimensions.llm_features_dim, "text encoder gives features"),
            (vae.tokens, dimensions.in_channels, "VAE gives tokens"),
        ):
            if made != taken:
                raise CheckpointError(
                    file,
                    f"its {of} of {made} channels, the transformer takes {taken}",
                    "Keep the parts of one checkpoint together.",
                )
    clip = load_text_encoder(folder.text_encoder, folder.tokenizer)
    models, lines = [], []
    for file, name in zip(files, ("transformer", "unconditional transformer"), strict=False):
        choice = settle_row_wise(file, row_wise_weights)  # once the one before it has taken its memory
        models.append(load_diffusion_model(file, choice))
        lines.append(f"{name}: {describe_file(file, choice)}")
    lines += [
        f"text encoder: {text.describe()}, {text.dimensions.features} features a token",
        f"tokenizer: {len(clip.tokenizer.qwen3vl_8b.tokenizer):,} tokens, with the folder's own chat template",
        f"vae: {' '.join(map(str, vae.decoder))} channels wide, {vae.tokens} a token, its normalisation put into "
        "ComfyUI's order",
    ]
    if not with_unconditional and (root / "unconditional_transformer").is_dir():
        lines.append("unconditional transformer: there, not loaded; DEFAULT_20, QUALITY_48 and TURBO_12 need it")
    return Loaded(models[0], clip, load_vae(folder.vae), models[1] if len(models) > 1 else None, "\n".join(lines))


def _below(base: Path) -> Iterator[Path]:
    for folder, inner, _ in os.walk(base, followlinks=True):
        relative = Path(folder).relative_to(base)
        if all(part in inner for part in _PARTS):
            yield relative
            inner.clear()
        elif len(relative.parts) >= _DEEPEST:
            inner.clear()
