"""What is to be rendered."""

from __future__ import annotations

from dataclasses import dataclass

from ...sampling.presets import Preset
from ...sampling.schedule import SIZE_MULTIPLE, sigmas


class SettingsError(ValueError):
    """A setting that cannot be rendered, in one sentence."""


@dataclass(frozen=True)
class Settings:
    """A prompt, how to sample it, the picture's size in pixels and the seed of its noise.

    Raises:
        SettingsError: a side is no positive multiple of 16, or the seed no unsigned 64-bit number.
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
        if not 0 <= self.seed < 1 << 64:
            raise SettingsError(f"the seed must be 0 to 2^64 - 1, got {self.seed}")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of image tokens."""
        return self.height // SIZE_MULTIPLE, self.width // SIZE_MULTIPLE
