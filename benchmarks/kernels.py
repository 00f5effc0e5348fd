"""Times every kernel against its eager form and against the floor that memory sets.

    python -m ideogram4_fusion.benchmarks.kernels [--tokens 512 1280 ...] [--output FILE]

The floor is the bytes that a chain must move (each input read once, each output written once) over the speed of a large
device copy, measured in the same run. A kernel that is not byte-equal to its reference in this run gets no time.

Calls are timed inside a replayed CUDA graph, one after another over inputs that together exceed the L2 cache by far: a
call is then neither charged for its launch from Python nor helped by what the one before it left in the cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from ..fusion.chains import GATE, MODULATE, ROPE, SILU_MUL, Chain, load_chains
from ..fusion.proof import differing
from . import record

HIDDEN, HEADS, HEAD, INNER = 4608, 18, 256, 12288
TOKENS = (512, 1280, 4096, 4352, 4736, 16640)  # 256, 512, 1024 pixels a side with 256 tokens of text, ..., 2048
EPS = 1e-5
COPY_BYTES = 1 << 31
CACHE_BYTES = 1 << 28  # over four times the L2 cache of an H200
REPLAYS, WARM_UP_REPLAYS = 60, 10


@dataclass(frozen=True)
class Workload:
    """A chain at a size: its arguments, and the bytes it must move."""

    chain: str
    arguments: tuple[object, ...]
    moved: int


def workloads(tokens: int, device: torch.device, seed: int) -> Iterator[Workload]:
    """One workload a chain at `tokens` tokens of one image."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    x, branch, weight = random(1, tokens, HIDDEN), random(1, tokens, HIDDEN), random(HIDDEN)
    scale, gate, *_ = random(1, 1, 4 * HIDDEN).chunk(4, dim=-1)
    row = 2 * tokens * HIDDEN
    yield Workload(MODULATE, (x, weight, scale, EPS), 2 * row)
    yield Workload(GATE, (x, branch, weight, gate, EPS), 3 * row)
    yield Workload(SILU_MUL, (random(1, tokens, INNER), random(1, tokens, INNER)), 3 * 2 * tokens * INNER)
    heads = (random(1, tokens, HEADS, HEAD), random(1, tokens, HEAD), random(1, tokens, HEAD))
    yield Workload(ROPE, heads, 2 * row + 2 * 2 * tokens * HEAD)


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


def measure(sets: Sequence[Workload], chain: Chain, speed: float, tokens: int) -> dict[str, object]:
    """One row of the results over several sets of inputs. Its times are None where kernel and reference differ."""
    unequal = sum(int(differing(chain.fused(*s.arguments), chain.eager(*s.arguments))) for s in sets)
    moved = sets[0].moved
    floor = moved / speed
    row: dict[str, object] = {
        "chain": chain.name,
        "tokens": tokens,
        "dtype_out": "bfloat16",
        "floor_us": floor,
        "equal": unequal == 0,
        "unequal_values": unequal,
    }
    if unequal:
        return {**row, "us": None}
    inputs = [s.arguments for s in sets]
    fused, eager = microseconds(chain.fused, inputs), microseconds(chain.eager, inputs)
    return {
        **row,
        "us": fused["median"],
        "us_spread": fused,
        "eager_us": eager["median"],
        "eager_us_spread": eager,
        "times_floor": fused["median"] / floor,
        "gb_per_s": moved / fused["median"] / 1000,
    }


@torch.inference_mode()
def run(tokens: Sequence[int], device: torch.device) -> dict[str, object]:
    """Measures every chain at every number of tokens, printing a line for each."""
    speed, chains = copy_speed(device), load_chains()
    print(f"copy: {speed / 1e6:.2f} TB/s")
    rows = []
    for count in tokens:
        smallest = min(w.moved for w in workloads(1, device, 0)) * count
        sets = [list(workloads(count, device, seed)) for seed in range(max(2, min(32, -(-CACHE_BYTES // smallest))))]
        for same in zip(*sets, strict=True):
            row = measure(same, chains[same[0].chain], speed, count)
            rows.append(row)
            times = (
                "NOT EQUAL"
                if row["us"] is None
                else f"{row['us']:8.1f} us = {row['times_floor']:.2f} x floor, eager {row['eager_us']:8.1f} us"
            )
            print(f"{count:6d} {row['chain']:10s} {times}")
    return {"origin": record.origin(device), "copy_gb_per_s": speed / 1000, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--output", type=Path, default=record.RESULTS / "kernels.json")
    options = parser.parse_args()
    record.write(options.output, run(options.tokens, torch.device("cuda")))


if __name__ == "__main__":
    main()
