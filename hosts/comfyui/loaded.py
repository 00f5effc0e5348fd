"""What core's modules took of a file: core itself only logs it, and a half-loaded model would render noise."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ...checkpoint.errors import CheckpointError
from ...checkpoint.layout import ATTENTION_CONFIG


def refuse_half_loaded(file: Path, module: nn.Module, given: set[str]) -> None:
    """Raises unless a module has exactly the tensors that it was given, but for wishes that this core may not know.

    Args:
        file: the file to name.
        module: of core, once it is loaded.
        given: the names of the tensors that it was given.

    Raises:
        CheckpointError: it has others.
    """
    taken, kind = set(module.state_dict()), type(module).__name__
    wishes = {name for name in taken | given if name.endswith(ATTENTION_CONFIG)}
    taken, given = taken - wishes, given - wishes
    for names, problem in (
        (taken - given, f"the installed ComfyUI's {kind} has weights that the file lacks"),
        (given - taken, f"the installed ComfyUI's {kind} has no place for some of the weights"),
    ):
        if names:
            raise CheckpointError(
                file,
                problem,
                "This part of ComfyUI has changed: update this node pack, or use the ComfyUI version it names.",
                min(names),
            )
