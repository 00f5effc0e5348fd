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
from typing import Any

import torch
import triton

from ..fusion.proof import differing, paired
from ..kernels import (
    rms_norm_gate,
    rms_norm_gate_modulate,
    rms_norm_modulate,
    rms_norm_rope,
    rotate_half_rope,
    silu_mul,
)
from . import record

HIDDEN, HEADS, HEAD, INNER = 4608, 18, 256, 12288
TOKENS = (512, 1280, 4096, 4352, 4736, 16640)  # 256, 512, 1024 pixels a side with 256 tokens of text, ..., 2048
EPS = 1e-5
COPY_BYTES = 1 << 31
CACHE_BYTES = 1 << 28  # over four times the L2 cache of an H200
REPLAYS, WARM_UP_REPLAYS = 60, 10
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Workload:
    """A chain at a size: kernel and eager form, their arguments, and the bytes that they must move."""

    chain: str
    fused: Callable[..., Any]
    eager: Callable[..., Any]
    arguments: tuple[object, ...]
    moved: int
    dtype_out: torch.dtype = torch.bfloat16


def workloads(tokens: int, device: torch.device, seed: int) -> Iterator[Workload]:
    """One workload a chain at `tokens` tokens of one image."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    x, branch, weight = random(1, tokens, HIDDEN), random(1, tokens, HIDDEN), random(HIDDEN)
    scale, gate, *_ = random(1, 1, 4 * HIDDEN).chunk(4, dim=-1)
    a, b = random(1, tokens, INNER), random(1, tokens, INNER)
    row, inner = 2 * tokens * HIDDEN, 2 * tokens * INNER
    for dtype in (torch.bfloat16, FP8):
        width = dtype.itemsize
        yield Workload(
            "modulate",
            rms_norm_modulate.launch_rms_norm_modulate,
            rms_norm_modulate.rms_norm_modulate_reference,
            (x, weight, scale, EPS, dtype),
            row + row * width // 2,
            dtype,
        )
        yield Workload(
            "gate+modulate",
            rms_norm_gate_modulate.launch_rms_norm_gate_modulate,
            rms_norm_gate_modulate.rms_norm_gate_modulate_reference,
            (x, branch, weight, gate, weight, scale, EPS, EPS, dtype),
            3 * row + row * width // 2,
            dtype,
        )
        yield Workload(
            "silu-mul",
            silu_mul.launch_silu_mul,
            silu_mul.silu_mul_reference,
            (a, b, dtype),
            2 * inner + inner * width // 2,
            dtype,
        )
    yield Workload(
        "gate",
        rms_norm_gate.launch_rms_norm_gate,
        rms_norm_gate.rms_norm_gate_reference,
        (x, branch, weight, gate, EPS),
        3 * row,
    )
    # One tensor, queries or keys; a block has both. Queries lie in the qkv tensor, with gaps.
    queries = random(1, tokens, 3, HEADS, HEAD).unbind(dim=2)[0]
    angle = torch.rand(1, tokens, 1, HEAD // 2, generator=generator, device=device)
    freqs = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), dim=-1).unflatten(-1, (2, 2))
    yield Workload(
        "rms-norm-rope",
        rms_norm_rope.launch_rms_norm_rope,
        rms_norm_rope.rms_norm_rope_reference,
        (queries, random(HEAD), freqs.contiguous(), EPS),
        2 * row + freqs.numel() * 4,
    )
    yield Workload(
        "rotate-half-rope",
        rotate_half_rope.launch_rotate_half_rope,
        rotate_half_rope.rotate_half_rope_reference,
        (queries, random(1, tokens, HEAD), random(1, tokens, HEAD)),
        2 * row + 2 * 2 * tokens * HEAD,
    )


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


def measure(sets: Sequence[Workload], speed: float, tokens: int) -> dict[str, object]:
    """One row of the results over several sets of inputs. Its times are None where kernel and reference differ."""
    first = sets[0]
    unequal = sum(
        int(differing(ours, theirs))
        for s in sets
        for ours, theirs in paired(s.fused(*s.arguments), s.eager(*s.arguments))
    )
    floor = first.moved / speed
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
    return {
        **row,
        "us": fused["median"],
        "us_spread": fused,
        "eager_us": eager["median"],
        "eager_us_spread": eager,
        "times_floor": fused["median"] / floor,
        "gb_per_s": first.moved / fused["median"] / 1000,
    }


@torch.inference_mode()
def run(tokens: Sequence[int], device: torch.device) -> dict[str, object]:
    """Measures every chain at every number of tokens, printing a line for each."""
    speed = copy_speed(device)
    print(f"copy: {speed / 1e6:.2f} TB/s")
    rows = []
    for count in tokens:
        smallest = min(w.moved for w in workloads(1, device, 0)) * count
        sets = [list(workloads(count, device, seed)) for seed in range(max(2, min(32, -(-CACHE_BYTES // smallest))))]
        for same in zip(*sets, strict=True):
            row = measure(same, speed, count)
            rows.append(row)
            times = (
                f"NOT EQUAL ({row['unequal_values']})"
                if row["us"] is None
                else f"{row['us']:8.1f} us = {row['times_floor']:.2f} x floor, eager {row['eager_us']:8.1f} us"
            )
            print(f"{count:6d} {row['chain']:17s} {row['dtype_out']:13s} {times}")
    return {"origin": record.origin(device), "copy_gb_per_s": speed / 1000, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--output", type=Path, default=record.RESULTS / "kernels.json")
    options = parser.parse_args()
    record.write(options.output, run(options.tokens, torch.device("cuda")))


if __name__ == "__main__":
    main()
