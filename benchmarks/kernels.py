"""Times every kernel against its eager form and against the floor that memory sets.

    python -m ideogram4_fusion.benchmarks.kernels [--tokens 512 1280 ...] [--output FILE]

The floor is the bytes that a chain must move (each input read once, each output written once) over the speed of a large
device copy, measured in the same run. A kernel that is not byte-equal to its reference in this run gets no time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
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


@dataclass(frozen=True)
class Workload:
    """A chain at a size: its arguments, and the bytes it must move."""

    chain: str
    arguments: tuple[object, ...]
    moved: int


def workloads(tokens: int, device: torch.device) -> Iterator[Workload]:
    """One workload a chain at `tokens` tokens of one image."""
    generator = torch.Generator(device=device).manual_seed(tokens)

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


def microseconds(function: Callable[[], object]) -> dict[str, float]:
    """Spread of single-call times; Triton's do_bench flushes the L2 cache before each."""
    times = triton.testing.do_bench(function, warmup=25, rep=150, return_mode="all")
    return record.spread([1000 * t for t in times])


def copy_speed(device: torch.device) -> float:
    """Bytes per microsecond, read and written, of a large device copy."""
    source = torch.empty(COPY_BYTES // 2, dtype=torch.int16, device=device).random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / microseconds(lambda: target.copy_(source))["median"]


def measure(workload: Workload, chain: Chain, speed: float, tokens: int) -> dict[str, object]:
    """One row of the results. Its times are None where kernel and reference differ."""
    unequal = int(differing(chain.fused(*workload.arguments), chain.eager(*workload.arguments)))
    floor = workload.moved / speed
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
    fused = microseconds(lambda: chain.fused(*workload.arguments))
    eager = microseconds(lambda: chain.eager(*workload.arguments))
    return {
        **row,
        "us": fused["median"],
        "us_spread": fused,
        "eager_us": eager["median"],
        "eager_us_spread": eager,
        "times_floor": fused["median"] / floor,
        "gb_per_s": workload.moved / fused["median"] / 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--output", type=Path, default=record.RESULTS / "kernels.json")
    options = parser.parse_args()
    device = torch.device("cuda")
    speed, chains = copy_speed(device), load_chains()
    print(f"copy: {speed / 1e6:.2f} TB/s")
    rows = []
    for tokens in options.tokens:
        for workload in workloads(tokens, device):
            row = measure(workload, chains[workload.chain], speed, tokens)
            rows.append(row)
            times = (
                "NOT EQUAL"
                if row["us"] is None
                else f"{row['us']:8.1f} us = {row['times_floor']:.2f} x floor, eager {row['eager_us']:8.1f} us"
            )
            print(f"{tokens:6d} {workload.chain:10s} {times}")
    record.write(options.output, {"origin": record.origin(device), "copy_gb_per_s": speed / 1000, "rows": rows})


if __name__ == "__main__":
    main()
