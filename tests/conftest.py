"""Mounts the repository under its import name, whatever its folder is called, and picks how Triton runs."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

if not torch.cuda.is_available():
    # Read by Triton when it is first imported: without a GPU its kernels run in the CPU interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Never put ROOT itself on sys.path: `nodes` there would shadow ComfyUI's own `nodes.py`.
_package = types.ModuleType("ideogram4_fusion")
_package.__path__ = [str(ROOT)]
sys.modules.setdefault("ideogram4_fusion", _package)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For pictures rendered on the CPU: two threads wait for each other beside another busy process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
