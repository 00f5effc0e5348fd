"""Times PyTorch's attention backends for `kernels/attention.py`: heads of 256 in bf16, one image, no mask.

    python -m ideogram4_fusion.benchmarks.attention [--tokens 512 1280 4352 16640] [--output FILE]

Of each backend: microseconds a call, and its relative L2 error against fp64 where that fits into memory. A backend that
does not take the arguments is left out. FLASH_ATTENTION is what PyTorch chooses by itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..kernels.attention import attention_reference
from . import record
from .distances import relative
from .kernels import microseconds

HEADS, HEAD_DIM = 18, 256  # Ideogram 4's
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
CHECKED = 4352  # tokens up to which fp64 is asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1280, 4352, 16640])
    parser.add_argument("--output", type=Path, default=record.RESULTS / "attention.json")
    options = parser.parse_args()
    device = torch.device("cuda")
    rows = [row for tokens in options.tokens for row in measure(tokens, device)]
    record.write(options.output, {"origin": record.origin(device), "heads": HEADS, "head_dim": HEAD_DIM, "rows": rows})


@torch.inference_mode()
def measure(tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each backend that takes [1, HEADS, tokens, HEAD_DIM]."""
    generator = torch.Generator(device).manual_seed(0)
    shape = 1, HEADS, tokens, HEAD_DIM
    q, k, v = (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3))
    exact = attention_reference(q, k, v) if tokens <= CHECKED else None
    rows = []
    for backend in BACKENDS:
        with sdpa_kernel(backend):
            try:
                out = scaled_dot_product_attention(q, k, v)
            except RuntimeError as refusal:
                print(f"{backend.name}: {str(refusal).splitlines()[0]}")
                continue
            times = microseconds(scaled_dot_product_attention, [(q, k, v)])
        row: dict[str, Any] = {"tokens": tokens, "backend": backend.name, "us": times["median"], "us_spread": times}
        if exact is not None:
            row["relative_error"] = relative(out, exact)
        rows.append(row)
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    main()
