"""Times every kernel against its eager form, other kernels for the same chain, and the floor that memory sets.

    python -m ideogram4_fusion.benchmarks.kernels [--tokens 512 1280 ...] [--compile 4352 ...] [--output FILE]

The floor is the bytes that a chain must move (each input read once, each output written once) over the speed of a large
device copy, measured in the same run. A kernel that is not byte-equal to its reference in this run gets no time.

Calls are timed inside a replayed CUDA graph, one after another over inputs that together exceed the L2 cache by far: a
call is then neither charged for its launch from Python nor helped by what the one before it left in the cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from ..fusion.proof import differing, paired
from . import record
from .kernel_rivals import rivals
from .kernel_workloads import Workload, workloads

TOKENS = (512, 1280, 4096, 4352, 4736, 16640)  # 256, 512, 1024 pixels a side with 256 tokens of text, ..., 2048
COPY_BYTES = 1 << 31
CACHE_BYTES = 1 << 28  # over four times the L2 cache of an H200
REPLAYS, WARM_UP_REPLAYS = 60, 10


def microseconds(function: Callable[..., object], inputs: Sequence[tuple[object, ...]]) -> dict[str, float]:
    """Spread of the time of one call, over replays of a graph that calls `function` on each of `inputs` in turn."""
    for arguments in inputs:
        function(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in inputs:
            function(*arguments)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(inputs))
    return record.spread(times[WARM_UP_REPLAYS:])


def copy_speed(device: torch.device) -> float:
    """Bytes per microsecond, read and written, of a large device copy; a graph would take a slower copy engine."""
    source = torch.empty(COPY_BYTES // 2, dtype=torch.int16, device=device).random_()
    target = torch.empty_like(source)
    times = triton.testing.do_bench(lambda: target.copy_(source), return_mode="all")
    return 2 * COPY_BYTES / (1000 * statistics.median(times))


def unequal_values(sets: Sequence[Workload], form: Callable[..., Any]) -> int:
    """How many values of a chain's form differ from its eager one, over all inputs."""
    return sum(
        int(differing(ours, theirs)) for s in sets for ours, theirs in paired(form(*s.arguments), s.eager(*s.arguments))
    )


def measure(sets: Sequence[Workload], speed: float, tokens: int, compiles: bool) -> dict[str, object]:
    """One row of the results over several sets of inputs. Its times are None where kernel and reference differ."""
    first = sets[0]
    floor = first.moved / speed
    unequal = unequal_values(sets, first.fused)
    row: dict[str, object] = {
        "chain": first.chain,
        "tokens": tokens,
        "dtype_out": str(first.dtype_out).removeprefix("torch."),
        "floor_us": floor,
        "equal": unequal == 0,
        "unequal_values": unequal,
    }
    if unequal:
        return {**row, "us": None}
    inputs = [s.arguments for s in sets]
    fused, eager = microseconds(first.fused, inputs), microseconds(first.eager, inputs)
    others: dict[str, object] = {}
    for name, form in rivals(first, compiles).items():
        try:
            others[name] = {"equal": unequal_values(sets, form) == 0, **microseconds(form, inputs)}
        except Exception as error:
            others[name] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
    return {
        **row,
        "us": fused["median"],
        "us_spread": fused,
        "eager_us": eager["median"],
        "eager_us_spread": eager,
        "others_us": others,
        "times_floor": fused["median"] / floor,
        "share_of_floor": floor / fused["median"],
        "gb_per_s": first.moved / fused["median"] / 1000,
    }


@torch.inference_mode()
def run(tokens: Sequence[int], compiled: Sequence[int], device: torch.device) -> dict[str, object]:
    """Measures every chain at every number of tokens, printing a line for each."""
    speed = copy_speed(device)
    print(f"copy: {speed / 1e6:.2f} TB/s")
    rows = []
    for count in tokens:
        smallest = min(w.moved for w in workloads(1, device, 0)) * count
        sets = [list(workloads(count, device, seed)) for seed in range(max(2, min(32, -(-CACHE_BYTES // smallest))))]
        for same in zip(*sets, strict=True):
            row = measure(same, speed, count, count in compiled)
            rows.append(row)
            print(line(row), flush=True)
    return {"origin": record.origin(device), "copy_gb_per_s": speed / 1000, "rows": rows}


def line(row: dict[str, Any]) -> str:
    """A row of the results for the terminal."""
    head = f"{row['tokens']:6d} {row['chain']:17s} {row['dtype_out']:13s}"
    if row["us"] is None:
        return f"{head} NOT EQUAL ({row['unequal_values']})"
    others = [
        f"{name} " + (f"{o['median']:.1f} us{'' if o['equal'] else ' (not equal)'}" if "median" in o else "failed")
        for name, o in row["others_us"].items()
    ]
    times = [f"{row['us']:8.1f} us = {row['times_floor']:.2f} x floor", f"eager {row['eager_us']:.1f} us", *others]
    return f"{head} {', '.join(times)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--compile", type=int, nargs="*", default=[4352], help="sizes at which torch.compile is timed")
    parser.add_argument("--output", type=Path, default=record.RESULTS / "kernels.json")
    options = parser.parse_args()
    record.write(options.output, run(options.tokens, options.compile, torch.device("cuda")))


if __name__ == "__main__":
    main()
