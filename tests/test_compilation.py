"""Every kernel compiles for the GPUs that artists have, also where the tests run without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize(("capability", "kernels"), [("8.0", 6), ("9.0", 14), ("12.0", 14)], ids=str)
def test_every_kernel_compiles(capability: str, kernels: int) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), capability], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == kernels
