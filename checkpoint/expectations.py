"""What a file must hold, asked for tensor by tensor, and one complaint about all that it does not."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import CheckpointError
from .header import Header, TensorInfo

FLOATS = ("BF16", "F16", "F32")
_NAMED_AT_MOST = 3


class Expectations:
    """Compares tensors with those that are asked for; each that was not is unknown.

    Args:
        found: the tensors of the file, or of one part of it, prefix stripped.
    """

    def __init__(self, found: Mapping[str, TensorInfo]) -> None:
        self.found = found
        self._missing: list[str] = []
        self._wrong: list[str] = []
        self._seen: set[str] = set()

    def expect(self, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...] = FLOATS) -> None:
        """Asks for a tensor of one of the shapes and dtypes (safetensors' names)."""
        self._seen.add(name)
        info = self.found.get(name)
        if info is None:
            self._missing.append(name)
        elif info.shape not in shapes or info.dtype not in dtypes:
            wanted = TensorInfo("/".join(dtypes), shapes[0])
            self._wrong.append(f"{name} is {_words(info)}, expected {_words(wanted)}")

    def allow(self, name: str) -> None:
        """A tensor that may be there, of any kind."""
        self._seen.add(name)

    def settle(self, header: Header, prefix: str, advice: str) -> None:
        """Raises unless the tensors are those that were asked for or allowed.

        Raises:
            CheckpointError: some are missing, unknown, or of a wrong shape or dtype; up to three of each are named.
        """
        unknown = [name for name in self.found if name not in self._seen]
        complaints = [
            _complaint(f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what}", names)
            for what, names in (
                ("missing", self._missing),
                ("unknown", unknown),
                ("of a wrong shape or dtype", self._wrong),
            )
            if names
        ]
        if complaints:
            key = next(iter(self._missing or unknown or [self._wrong[0].partition(" is ")[0]]))
            raise CheckpointError(header.file, "; ".join(complaints), advice, prefix + key)


def _words(info: TensorInfo) -> str:
    return f"{list(info.shape)} {info.dtype}"


def _complaint(what: str, names: list[str]) -> str:
    rest = len(names) - _NAMED_AT_MOST
    return f"{what}: {', '.join(names[:_NAMED_AT_MOST])}{f' and {rest} more' if rest > 0 else ''}"
