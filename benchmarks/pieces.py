"""The pieces of `high`, each by itself, by the names under which they are measured."""

from __future__ import annotations

from dataclasses import replace

from ..fusion.pieces import AUTO, NONE

ALONE = {
    "attention": replace(NONE, attention=AUTO),
    "fast accumulation": replace(NONE, fast_accumulation=True),
    "row-wise fp8": replace(NONE, row_wise_fp8=True),
    "unproven chains": replace(NONE, unproven_chains=True),
}
