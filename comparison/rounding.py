"""Numbers for the report, rounded so that they never promise more than was measured."""

from __future__ import annotations

import math
from decimal import MAX_PREC, ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def floored(value: float, places: int) -> str:
    """`value` to `places` decimals, rounded down: for what is better when larger, as PSNR. `inf` stays `inf`."""
    return _rounded(value, places, ROUND_FLOOR)


def ceiled(value: float, places: int) -> str:
    """`value` to `places` decimals, rounded up: for what is better when smaller, as times and errors."""
    return _rounded(value, places, ROUND_CEILING)


def _rounded(value: float, places: int, rounding: str) -> str:
    if not math.isfinite(value):
        return str(value)
    # Through the shortest decimal that names the float: 0.3 is 0.3, not the 0.29999... of its binary form.
    # The default context's 28 digits would be too few from 1e27 on.
    exact = Context(prec=MAX_PREC)
    return f"{Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-places), rounding, exact):f}"
