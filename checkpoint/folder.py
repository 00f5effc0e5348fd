"""A checkpoint folder in the official layout: where its parts are, and what it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError
from .shards import find_shards

_OFFICIAL = "ideogram-ai/ideogram-4-fp8"


@dataclass(frozen=True)
class CheckpointFolder:
    """The parts of a checkpoint: `transformer` and `unconditional` are files, the others folders.

    `unconditional` is None where it was not asked for.
    """

    root: Path
    transformer: Path
    unconditional: Path | None
    text_encoder: Path
    tokenizer: Path
    vae: Path


def open_folder(root: Path, with_unconditional: bool = False) -> CheckpointFolder:
    """Finds the parts of a checkpoint, the unconditional transformer among them if asked for; reads nothing.

    Raises:
        CheckpointError: there is no such folder, a part is absent, or a transformer folder holds several models.
    """
    if not root.is_dir():
        problem = "this is a file" if root.exists() else "there is no such folder"
        raise CheckpointError(
            root, problem, f"Give the folder that holds transformer/, as downloaded from {_OFFICIAL}."
        )
    unconditional = root / "unconditional_transformer"
    if with_unconditional and not unconditional.is_dir():
        raise CheckpointError(
            root,
            f"it has no {unconditional.name}/, which a guided preset needs",
            "Add it, or choose a preset without guidance: INSTANT_8 or FAST_20.",
        )
    return CheckpointFolder(
        root=root,
        transformer=model_file(_part(root, "transformer")),
        unconditional=model_file(unconditional) if with_unconditional else None,
        text_encoder=_part(root, "text_encoder"),
        tokenizer=_part(root, "tokenizer"),
        vae=_part(root, "vae"),
    )


def model_file(folder: Path) -> Path:
    """The one model in a folder: its .safetensors file, or the first of its shards.

    Raises:
        CheckpointError: it holds none, or more than one.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(folder, "it holds no .safetensors file", "Download the folder again, weights included.")
    models = sorted({find_shards(file)[0] for file in files})
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise CheckpointError(folder, f"it holds {len(models)} models ({names})", "Keep the one to be used.")
    return models[0]


def _part(root: Path, name: str) -> Path:
    folder = root / name
    if not folder.is_dir():
        others = " or of fal/ideogram-v4-instant or -fast" if name == "transformer" else ""
        raise CheckpointError(root, f"it has no {name}/", f"Put the one of {_OFFICIAL}{others} there.")
    return folder
