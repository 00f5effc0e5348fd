"""Training by the clock: how far it is, and the learning rate that follows from it."""

from __future__ import annotations

import time

import torch

_WARM_UP = 200  # steps
_FALLING = 0.6  # of the time


class Budget:
    """Training from now until `end`, a reading of `time.perf_counter`.

    The learning rate rises to `peak` over the first steps, stays, and falls to zero over the last part of the time.
    """

    def __init__(self, end: float, peak: float) -> None:
        self.peak = peak
        self.step = 0
        self.start = time.perf_counter()
        self.seconds = end - self.start

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    def next_rate(self) -> float | None:
        """The learning rate of the next step, or None when the time is over."""
        if self.step % 10 == 0 and torch.cuda.is_available():
            torch.cuda.synchronize()  # else steps would be queued beyond the end
        left = self.seconds - self.spent
        if left <= 0:
            return None
        self.step += 1
        return self.peak * min(1.0, self.step / _WARM_UP, left / self.seconds / _FALLING)


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate
