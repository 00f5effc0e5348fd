"""Classifier-free guidance with two models and a scale of its own for every step, on core's two-model guider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from comfy_extras.nodes_custom_sampler import Guider_DualModel


class StepGuider(Guider_DualModel):
    """Core's two-model guider with the guidance scale chosen by step.

    A step is recognised by its noise level, so the scales stay right at every resolution, where a range of the
    schedule (core's CFGOverride) covers more or fewer steps than the presets name.
    """

    def set_guidance(self, levels: torch.Tensor, scales: Sequence[float]) -> None:
        """`levels`: noise levels [steps + 1]; `scales`: one a step, in sampling order."""
        self._levels = levels[:-1].double()
        self._scales = tuple(scales)

    def outer_sample(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Loads the second model if any step guides: core asks the scale, which the last step of a run has left."""
        self.set_cfg(next((scale for scale in self._scales if scale != 1.0), 1.0))
        sampled: torch.Tensor = super().outer_sample(*args, **kwargs)
        return sampled

    def predict_noise(
        self, x: torch.Tensor, timestep: torch.Tensor, model_options: dict[str, Any] | None = None, seed: Any = None
    ) -> torch.Tensor:
        """Sets the scale of the step whose level is nearest to `timestep`, then guides as core does."""
        level = timestep.flatten()[0].double().cpu()
        self.set_cfg(self._scales[int((self._levels - level).abs().argmin())])
        guided: torch.Tensor = super().predict_noise(x, timestep, {} if model_options is None else model_options, seed)
        return guided
