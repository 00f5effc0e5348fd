"""The named sampling presets of Ideogram 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

OFFICIAL = "ideogram-ai/ideogram-4-fp8"


@dataclass(frozen=True)
class Preset:
    """Everything that decides a sampling trajectory besides prompt, seed and size.

    `mu` and `std` shape the logit-normal schedule (see `schedule.sigmas`). `guidance` holds one classifier-free
    guidance scale per step in sampling order: the first belongs to the step with the most noise. `checkpoint`
    names the repository whose weights the numbers were made for; on other weights they give poor pictures.

    Raises ValueError unless `guidance` has `steps` entries.
    """

    name: str
    steps: int
    mu: float
    std: float
    guidance: tuple[float, ...]
    checkpoint: str

    def __post_init__(self) -> None:
        if self.steps < 1 or len(self.guidance) != self.steps:
            raise ValueError(
                f"preset {self.name}: {len(self.guidance)} guidance values for {self.steps} steps, one a step needed"
            )

    @property
    def needs_unconditional(self) -> bool:
        """Whether any step guides, and so needs the unconditional model; guidance 1 is the conditional alone."""
        return any(scale != 1.0 for scale in self.guidance)


_ALL = (
    Preset("INSTANT_8", 8, 0.0, 1.75, (1.0,) * 8, "fal/ideogram-v4-instant"),
    Preset("FAST_20", 20, 0.0, 1.75, (1.0,) * 20, "fal/ideogram-v4-fast"),
    Preset("DEFAULT_20", 20, 0.0, 1.75, (7.0,) * 18 + (3.0,) * 2, OFFICIAL),
    Preset("QUALITY_48", 48, 0.0, 1.5, (7.0,) * 45 + (3.0,) * 3, OFFICIAL),
    Preset("TURBO_12", 12, 0.5, 1.75, (7.0,) * 11 + (3.0,) * 1, OFFICIAL),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _ALL})
"""Preset by name, in the order to show them. The names are saved in workflows: none may ever change.

Source: SGLang, python/sglang/multimodal_gen/configs/sample/ideogram.py (`V4_` + name), whose guidance tuples start
with the last step and are therefore reversed here. Third-party tables exist that give INSTANT_8 a mu of 0.5.
"""
