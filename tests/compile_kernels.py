"""Compiles every kernel for a GPU that need not be there: python tests/compile_kernels.py 9.0

Prints one line a kernel. Run by test_compilation.py in a process of its own, since Triton decides when it is imported
whether it interprets.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

_package = types.ModuleType("ideogram4_fusion")
_package.__path__ = [str(Path(__file__).resolve().parent.parent)]
sys.modules.setdefault("ideogram4_fusion", _package)

import torch  # noqa: E402
import triton  # noqa: E402
from ideogram4_fusion.kernels import (  # noqa: E402
    launch,
    quantise,
    rms_norm_gate,
    rms_norm_gate_modulate,
    rms_norm_modulate,
    rms_norm_rope,
    rotate_half_rope,
    silu_mul,
)
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

HIDDEN, INNER, HEADS, HEAD, EPS = 4608, 12288, 18, 256, 1e-5
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv"}


def main(capability: tuple[int, int]) -> None:
    torch.cuda.get_device_capability = lambda device=None: capability  # type: ignore[assignment]
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    class Compile(launch.Launch):
        def __call__(self, *args: Any) -> None:
            names = self._kernel.arg_names
            given = dict(zip(names, args, strict=False))
            constants = dict(zip(names[len(args) :], self._constants, strict=True))
            signature = {name: _type(value) for name, value in given.items()} | dict.fromkeys(constants, "constexpr")
            aligned = {
                (names.index(name),): [["tt.divisibility", 16]]
                for name, value in given.items()
                if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
            }
            source = ASTSource(
                self._kernel,
                signature,
                constexprs={(names.index(name),): value for name, value in constants.items()},
                attrs=aligned,
            )
            options = {"num_warps": self._num_warps, "enable_fp_fusion": False}
            compiled = triton.compile(source, target=target, options=options)
            print(self._kernel.__name__, constants, len(compiled.asm["cubin"]), flush=True)

    for module in (quantise, rms_norm_gate, rms_norm_gate_modulate, rms_norm_modulate, rms_norm_rope, silu_mul):
        module.Launch = Compile  # type: ignore[attr-defined]
    rotate_half_rope.Launch = Compile  # type: ignore[attr-defined, misc]
    with FakeTensorMode():
        run_all(fp8=capability >= (8, 9))


def run_all(fp8: bool) -> None:
    """Every kernel in every form, through the functions that check and launch it."""

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    x, weight, (scale, gate, *_) = made(2, 33, HIDDEN), made(HIDDEN), made(2, 1, 4 * HIDDEN).chunk(4, dim=-1)
    a = made(2, 33, INNER)
    modulate, merge = (x, weight, scale, EPS), (x, x, weight, gate, weight, scale, EPS, EPS)
    rms_norm_gate.rms_norm_gate(x, x, weight, gate, EPS)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn) if fp8 else (torch.bfloat16,):
        rms_norm_modulate.rms_norm_modulate(*modulate, dtype)
        rms_norm_gate_modulate.rms_norm_gate_modulate(*merge, dtype)
        silu_mul.silu_mul(a, a, dtype)
    if fp8:
        quantise.quantise(x)
        quantise.quantise_rows(x)
        rms_norm_modulate.rms_norm_modulate_rows(*modulate)
        rms_norm_gate_modulate.rms_norm_gate_modulate_rows(*merge)
        silu_mul.silu_mul_rows(a, a)
    q, k, _ = made(2, 33, 3, HEADS, HEAD).unbind(dim=2)
    head = made(HEAD)
    rms_norm_rope.rms_norm_rope(q, k, head, head, made(1, 33, 1, HEAD // 2, 2, 2, dtype=torch.float32), EPS)
    rotate_half_rope.rotate_half_rope(q, made(1, 33, HEAD), made(1, 33, HEAD))


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


if __name__ == "__main__":
    major, minor = sys.argv[1].split(".")
    main((int(major), int(minor)))
