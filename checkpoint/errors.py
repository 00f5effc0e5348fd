"""The one error of this folder."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(ValueError):
    """A file is not a transformer that the pack can load; the message says which file, why, and what to use.

    Args:
        file: the file as it was asked for.
        problem: what is wrong with it, a clause without a full stop.
        advice: whole sentences that say what to do or to load instead.
        key: the tensor that shows the problem, where one does.
    """

    def __init__(self, file: Path, problem: str, advice: str, key: str | None = None) -> None:
        where = f" (tensor {key})" if key else ""
        super().__init__(f"{file}: {problem}{where}. {advice}")
        self.file = file
        self.problem = problem
        self.key = key
