"""Writes the tables of README.md and docs/measured.md from benchmarks/results/, every number rounded against us.

python -m ideogram4_fusion.benchmarks.table
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..comparison.rounding import ceiled, floored
from . import record

ROOT = record.RESULTS.parent.parent
# Each with whether it is brief.
DOCUMENTS = {ROOT / "README.md": True, ROOT / "docs" / "measured.md": False}
BEGIN, END = "<!-- measured: made by `make bench` -->", "<!-- end of what was measured -->"
SHOWN_TOKENS = 4352  # 1024 x 1024 pixels with 256 tokens of text
DYNAMIC, PLAIN, ROW_WISE, ROW_WISE_BF16 = "dynamic", "plain", "row_wise", "row_wise_bf16"
SETTINGS = {
    DYNAMIC: "fp8_scaled, dynamic VRAM (default)",
    PLAIN: "fp8_scaled, `--disable-dynamic-vram`",
    ROW_WISE: "official row-wise fp8, kept as fp8",
    ROW_WISE_BF16: "official row-wise fp8, as bf16",
}
WHOLE = ("lossless", "high")
ERRORS = {other: f"velocity_error_to_{other}" for other in ("lossless", "fp32")}
TO_FP32, OF_BLOCK = "PSNR dB to fp32", "velocity of one full-size block from both"  # columns that are not brief
FLASH, CUDNN = "FLASH_ATTENTION", "CUDNN_ATTENTION"
# As the distances of pictures name them: as those of one block do, and as readers know them.
LAYOUTS = {"row-wise fp8": ("fp8_row_wise", "official"), "fp8_scaled": ("fp8_scaled", "fp8_scaled")}


def main() -> None:
    for document, brief in DOCUMENTS.items():
        document.write_text(inserted(document.read_text(encoding="utf-8"), brief), encoding="utf-8")


def inserted(text: str, brief: bool) -> str:
    """A document with its measured part made anew. Raises ValueError if its place is not marked."""
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise ValueError(f"there is no place for tables between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{measured(brief)}\n\n{END}{after}"


def measured(brief: bool, results: Path = record.RESULTS) -> str:
    """Markdown of all results; in `brief` the steps and distances of whole qualities, as most will run them."""
    found = {name: _read(results / f"comfyui_{name}.json") for name in SETTINGS}
    steps = {name: result["steps"] for name, result in found.items() if result}
    distance = _read(results / "comfyui_distance.json")
    if brief:
        steps = {name: [r for r in rows if r["quality"] in WHOLE] for name, rows in steps.items() if name != PLAIN}
        return "\n\n".join([*_steps(steps), *_distances(distance, brief)])
    generations = {name: result["generations"] for name, result in found.items() if result}
    tables = (
        _steps(steps),
        _generations(generations),
        _renders(results),
        _headless(_read(results / "headless.json")),
        _distances(distance, brief),
        _attention(_read(results / "attention.json")),
        _kernels(_read(results / "kernels.json")),
    )
    return "\n\n".join(table for group in tables for table in group)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _steps(settings: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """A table a setting, a column a size, a line a quality: the ratio to stock, milliseconds and their quartiles."""
    for setting, rows in settings.items():
        sizes = list(dict.fromkeys(row["size"] for row in rows))
        stock = {row["size"]: _spread(row["stock_step_ms_spread"], floored) for row in rows}
        lines = [["stock, ms", *(stock[size] for size in sizes), ""]]
        for quality in dict.fromkeys(row["quality"] for row in rows):
            found = {row["size"]: row for row in rows if row["quality"] == quality}
            cells = (_step(found[size]) if size in found else "" for size in sizes)
            equal = all(row["equal_to_stock"] for row in found.values())
            lines.append([quality, *cells, _yes(equal, quality)])
        yield _table([SETTINGS[setting], *(f"{size} px" for size in sizes), "equal"], lines)


def _step(row: Mapping[str, Any]) -> str:
    ratio = row["ratio_to_stock"]
    times = _spread(row["step_ms_spread"], ceiled)
    return times if ratio is None else f"**{floored(ratio, 2)}** {times}"


def _generations(settings: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    lines = []
    for setting, rows in settings.items():
        stock = {(row["preset"], row["size"]): row for row in rows if row["quality"] == "off"}
        for row in rows:
            if row["quality"] == "off":
                continue
            ratio = row["ratio_to_stock"]
            lines.append(
                [
                    f"{row['preset']}, {row['size']}, {row['quality']}",
                    SETTINGS[setting],
                    floored(stock[row["preset"], row["size"]]["seconds"], 2),
                    ceiled(row["seconds"], 2),
                    "-" if ratio is None else floored(ratio, 2),
                    _yes(row["equal_to_stock"], row["quality"]),
                ]
            )
    if lines:
        yield _table(["generation", "setting", "stock s", "fused s", "ratio", "equal"], lines)


def _renders(results: Path) -> Iterator[str]:
    lines = []
    for path in sorted(results.glob("comfyui_*_off_lossless.json")):
        result = _read(path)
        report = result["report"]
        stock, ours = (statistics.median(report[side]["seconds_per_step"]) for side in "ab")
        lines.append(
            [
                f"{report['preset']}, {report['width']}, lossless, {SETTINGS[result['patcher']]}",
                floored(stock, 4),
                ceiled(ours, 4),
                ceiled(report["total_ratio"], 3),
                f"{report['metrics']['differing']:,} of {report['metrics']['values']:,}",
            ]
        )
    if lines:
        head = ["render", "stock s a step", "fused s a step", "whole, of stock's", "pixels that differ"]
        yield _table(head, lines)


def _headless(result: Mapping[str, Any] | None) -> Iterator[str]:
    if result is None:
        return
    lines = []
    for row in result["rows"]:
        rounded = floored if row["quality"] == "off" else ceiled
        metrics = ((row["psnr_db"], 1), (row["ssim"], 3))
        lines.append(
            [
                *(row[name] for name in ("preset", "prompt", "quality")),
                rounded(row["seconds"], 2),
                *("-" if value is None else floored(value, places) for value, places in metrics),
                _yes(row["equal_to_stock"], row["quality"]),
            ]
        )
    yield _table(["real weights", "subject", "quality", "seconds", "PSNR dB", "SSIM", "identical"], lines)


def _distances(result: Mapping[str, Any] | None, brief: bool) -> Iterator[str]:
    """A line for each variant in each layout, and for `lossless`, which has a distance from fp32 too."""
    if result is None:
        return
    blocks = {(row["layout"], row["variant"]): row for row in result["blocks"]}
    presets = list(dict.fromkeys(row["preset"] for row in result["rows"]))
    lines: list[dict[str, str]] = []
    for layout, variant in dict.fromkeys((row["layout"], row["variant"]) for row in result["rows"]):
        if brief and variant not in WHOLE:
            continue
        rows = [row for row in result["rows"] if (row["layout"], row["variant"]) == (layout, variant)]
        found = {row["preset"]: row for row in rows}
        stored, described = LAYOUTS[layout]
        cells = {
            "distance": variant if variant in (*WHOLE, "stock") else f"high: {variant}",
            "weights": described,
            **{f"{p}: PSNR dB, SSIM": _pictures(found[p]) if p in found else "" for p in presets},
            TO_FP32: _least([row["psnr_db_to_fp32"] for row in rows], 1),
            **{f"velocity from {other}": _velocities([row[error] for row in rows]) for other, error in ERRORS.items()},
            OF_BLOCK: ", ".join(f"{ceiled(100 * blocks[stored, variant][error], 1)} %" for error in ERRORS.values()),
        }
        lines.append({head: cell for head, cell in cells.items() if not (brief and head in (TO_FP32, OF_BLOCK))})
    yield _table(list(lines[0]), [list(line.values()) for line in lines])


def _pictures(row: Mapping[str, Any]) -> str:
    """How near the pictures of a preset are to those of `lossless`."""
    if row["identical_to_lossless"] == row["captions"]:
        return "identical"
    return f"{_least([row['psnr_db_to_lossless']], 1)}, {_least([row['ssim_to_lossless']], 3)}"


def _least(presets: Sequence[Mapping[str, Any]], places: int) -> str:
    """Median of the captions and, in brackets, the least, each of the worse preset; null where PSNR is infinite."""
    median, least = (
        min(math.inf if preset[which] is None else preset[which] for preset in presets) for which in ("median", "min")
    )
    return f"{floored(median, places)} ({floored(least, places)})"


def _velocities(presets: Sequence[Sequence[float]]) -> str:
    """Median of the errors at all steps and, in brackets, the most, each of the worse preset."""
    median, most = max(statistics.median(errors) for errors in presets), max(max(errors) for errors in presets)
    return f"{ceiled(100 * median, 1)} ({ceiled(100 * most, 1)}) %"


def _attention(result: Mapping[str, Any] | None) -> Iterator[str]:
    """A line for each number of tokens; a backend did not take those where its cells are empty."""
    if result is None:
        return
    found = {(row["tokens"], row["backend"]): row for row in result["rows"]}
    lines = []
    for tokens in dict.fromkeys(row["tokens"] for row in result["rows"]):
        line = [str(tokens)]
        for backend, rounded in ((FLASH, floored), (CUDNN, ceiled)):
            row = found.get((tokens, backend), {})
            line.append(rounded(row["us"], 1) if row else "")
            line.append(f"{rounded(100 * row['relative_error'], 3)} %" if "relative_error" in row else "")
        lines.append(line)
    yield _table(["attention, tokens", *(cell for name in (FLASH, CUDNN) for cell in (f"{name} µs", "error"))], lines)


def _kernels(result: Mapping[str, Any] | None) -> Iterator[str]:
    if result is None:
        return
    lines = []
    for row in result["rows"]:
        if row["tokens"] != SHOWN_TOKENS:
            continue
        head = [row["chain"], row["dtype_out"].replace("float8_e4m3fn", "fp8").replace("bfloat16", "bf16")]
        if row["us"] is None:
            lines.append([*head, "not equal", "", "", ""])
            continue
        others = [
            f"{name} {floored(times['median'], 1)}{'' if times['equal'] else ' (not equal)'}"
            for name, times in row["others_us"].items()
            if "median" in times
        ]
        ours = ceiled(row["us"], 1), ceiled(row["times_floor"], 2)
        lines.append([*head, *ours, floored(row["eager_us"], 1), ", ".join(others)])
    yield _table(["kernel", "writes", "µs", "x floor", "eager µs", "others µs"], lines)


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
