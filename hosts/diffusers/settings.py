"""What is to be rendered."""

from __future__ import annotations

from dataclasses import dataclass

from ...sampling.presets import Preset
from ...sampling.schedule import SIZE_MULTIPLE, sigmas

_LARGEST_SIDE = (1 << 31) - 1  # what picture formats count up to; beyond it, torch's own integers overflow


class SettingsError(ValueError):
    """A setting that cannot be rendered, in one sentence."""


@dataclass(frozen=True)
class Settings:
    """A prompt, how to sample it, the picture's size in pixels and the seed of its noise.

    Raises:
        SettingsError: a side is no positive multiple of 16 or beyond 2^31 - 1, the seed no unsigned 64-bit number, or
            the prompt no Unicode text.
    """

    prompt: str
    preset: Preset
    width: int
    height: int
    seed: int

    def __post_init__(self) -> None:
        try:
            sigmas(self.preset, self.width, self.height)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        if max(self.width, self.height) > _LARGEST_SIDE:
            raise SettingsError(f"a side can have {_LARGEST_SIDE:,} pixels at most, got {self.width} x {self.height}")
        if not 0 <= self.seed < 1 << 64:
            raise SettingsError(f"the seed must be 0 to 2^64 - 1, got {self.seed}")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:  # what a shell hands over in another encoding
            raise SettingsError(f"the prompt is no Unicode text from character {error.start + 1} on") from error

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of image tokens."""
        return self.height // SIZE_MULTIPLE, self.width // SIZE_MULTIPLE
