"""Writes the README's tables from benchmarks/results/, every number rounded against us.

python -m ideogram4_fusion.benchmarks.table
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..comparison.rounding import ceiled, floored
from . import record

README = record.RESULTS.parent.parent / "README.md"
BEGIN, END = "<!-- measured: made by `make bench` -->", "<!-- end of what was measured -->"
SHOWN_TOKENS = 4352  # 1024 x 1024 pixels with 256 tokens of text
PATCHERS = {"dynamic": "dynamic VRAM (default)", "plain": "`--disable-dynamic-vram`"}
OTHERS = {"comfyui_row_wise": "row-wise fp8 kept"}  # results of steps with other weights than fp8_scaled


def main() -> None:
    README.write_text(inserted(README.read_text(encoding="utf-8")), encoding="utf-8")


def inserted(text: str) -> str:
    """The README with its measured part made anew. Raises ValueError if its place is not marked."""
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise ValueError(f"{README.name} has no place for its tables between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{measured()}\n\n{END}{after}"


def measured(results: Path = record.RESULTS) -> str:
    """Markdown of all results."""
    found = {
        patcher: json.loads(path.read_text(encoding="utf-8"))
        for patcher in PATCHERS
        if (path := results / f"comfyui_{patcher}.json").is_file()
    }
    settings = {PATCHERS[patcher]: result for patcher, result in found.items()} | {
        setting: json.loads(path.read_text(encoding="utf-8"))
        for name, setting in OTHERS.items()
        if (path := results / f"{name}.json").is_file()
    }
    parts = []
    parts += [_steps(setting, result["steps"]) for setting, result in settings.items()]
    if generations := list(_generations(found)):
        parts.append(_table(["generation", "patcher", "stock s", "fused s", "ratio", "equal"], generations))
    if renders := list(_renders(results)):
        head = ["render", "stock s a step", "fused s a step", "whole, of stock's", "pixels that differ"]
        parts.append(_table(head, renders))
    if (path := results / "kernels.json").is_file():
        kernels = list(_kernels(json.loads(path.read_text(encoding="utf-8"))))
        parts.append(_table(["kernel", "writes", "µs", "x floor", "eager µs", "others µs"], kernels))
    return "\n\n".join(parts)


def _steps(setting: str, rows: list[dict[str, Any]]) -> str:
    """A column a size, a line a quality: the ratio to stock, milliseconds and their quartiles."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    stock = {row["size"]: _spread(row["stock_step_ms_spread"], floored) for row in rows}
    lines = [["stock, ms", *(stock[size] for size in sizes), ""]]
    for quality in dict.fromkeys(row["quality"] for row in rows):
        found = {row["size"]: row for row in rows if row["quality"] == quality}
        cells = (_step(found[size]) if size in found else "" for size in sizes)
        equal = all(row["equal_to_stock"] for row in found.values())
        lines.append([quality, *cells, _yes(equal, quality)])
    return _table([setting, *(f"{size} px" for size in sizes), "equal"], lines)


def _step(row: Mapping[str, Any]) -> str:
    ratio = row["ratio_to_stock"]
    times = _spread(row["step_ms_spread"], ceiled)
    return times if ratio is None else f"**{floored(ratio, 2)}** {times}"


def _generations(found: Mapping[str, Any]) -> Iterator[list[str]]:
    for patcher, result in found.items():
        rows = result["generations"]
        for row in rows:
            if row["quality"] == "off":
                continue
            stock = next(
                r for r in rows if (r["preset"], r["size"], r["quality"]) == (row["preset"], row["size"], "off")
            )
            ratio = row["ratio_to_stock"]
            yield [
                f"{row['preset']}, {row['size']}, {row['quality']}",
                PATCHERS[patcher],
                floored(stock["seconds"], 2),
                ceiled(row["seconds"], 2),
                "-" if ratio is None else floored(ratio, 2),
                _yes(row["equal_to_stock"], row["quality"]),
            ]


def _renders(results: Path) -> Iterator[list[str]]:
    for path in sorted(results.glob("comfyui_*_off_lossless.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        report = result["report"]
        stock, ours = (statistics.median(report[side]["seconds_per_step"]) for side in "ab")
        yield [
            f"{report['preset']}, {report['width']}, lossless, {PATCHERS[result['patcher']]}",
            floored(stock, 4),
            ceiled(ours, 4),
            ceiled(report["total_ratio"], 3),
            f"{report['metrics']['differing']:,} of {report['metrics']['values']:,}",
        ]


def _kernels(result: Mapping[str, Any]) -> Iterator[list[str]]:
    for row in result["rows"]:
        if row["tokens"] != SHOWN_TOKENS:
            continue
        head = [row["chain"], row["dtype_out"].replace("float8_e4m3fn", "fp8").replace("bfloat16", "bf16")]
        if row["us"] is None:
            yield [*head, "not equal", "", "", ""]
            continue
        others = [
            f"{name} {floored(times['median'], 1)}{'' if times['equal'] else ' (not equal)'}"
            for name, times in row["others_us"].items()
            if "median" in times
        ]
        ours = ceiled(row["us"], 1), ceiled(row["times_floor"], 2)
        yield [*head, *ours, floored(row["eager_us"], 1), ", ".join(others)]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _spread(spread: Mapping[str, float], rounded: Callable[[float, int], str]) -> str:
    return f"{rounded(spread['median'], 1)} ({rounded(spread['q1'], 1)} to {rounded(spread['q3'], 1)})"


def _yes(equal: bool, quality: str) -> str:
    """Loud where it was promised."""
    return "yes" if equal else "NO" if quality == "lossless" else "no"


if __name__ == "__main__":
    main()
