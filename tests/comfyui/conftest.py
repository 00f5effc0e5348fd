"""Puts a real ComfyUI on the path, started as its main.py starts it, writing into temporary folders only.

`COMFYUI_PATH` names it; `make test` finds it and runs this folder with ComfyUI's own Python. On an NVIDIA GPU
`COMFYUI_TEST_PATCHER` chooses between main.py's default, `dynamic`, and `plain` (--disable-dynamic-vram).
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from ideogram4_fusion.benchmarks.comfyui_process import start_comfyui

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
    from ideogram4_fusion.tests.comfyui.executor import Core

COMFYUI = Path(os.environ.get("COMFYUI_PATH", ""))
ON_GPU = torch.cuda.is_available()
DYNAMIC = ON_GPU and os.environ.get("COMFYUI_TEST_PATCHER", "dynamic") == "dynamic"

# The last commit of core whose block normed and rotated q and k in eager operations.
EARLIER_BLOCK = "f966a2b3^:comfy/ldm/ideogram4/model.py"


if (COMFYUI / "comfy" / "sd.py").is_file():
    start_comfyui(COMFYUI, on_gpu=ON_GPU, dynamic=DYNAMIC)
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def earlier_block() -> types.ModuleType:
    """core's Ideogram 4 as it was before `rms_rope_split_half`, out of ComfyUI's own history."""
    source = os.environ.get("COMFYUI_EARLIER_BLOCK")
    if source is not None:
        code = Path(source).read_text(encoding="utf-8")
    else:
        shown = subprocess.run(
            ["git", "-C", str(COMFYUI), "show", EARLIER_BLOCK], capture_output=True, text=True, check=False
        )
        if shown.returncode:
            pytest.skip("this ComfyUI has no history to take the earlier block from")
        code = shown.stdout
    module = types.ModuleType("earlier_ideogram4")
    exec(compile(code, "earlier_ideogram4.py", "exec"), module.__dict__)  # noqa: S102 - ComfyUI's own source
    return module


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    """core with all its nodes and the pack's, and model files of the names that the shipped workflows ask for."""
    from ideogram4_fusion.tests.comfyui.executor import Core
    from ideogram4_fusion.tests.comfyui.workflow_files import ROOT, write_models

    models = tmp_path_factory.mktemp("models")
    write_models(models)
    core = Core(models)
    core.load_pack(ROOT)
    yield core
    core.close()


@pytest.fixture
def inference() -> Iterator[None]:
    """Nodes run without gradients, as core runs them."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that stock has rendered once: its first forward in a process need not repeat itself."""
    from ideogram4_fusion.tests.comfyui.models import load, write_checkpoint
    from ideogram4_fusion.tests.comfyui.renders import render

    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    with torch.inference_mode():
        render(load(path))
    return path


@pytest.fixture
def model(path: Path, inference: None) -> ModelPatcher:
    """A MODEL of its own for the test."""
    from ideogram4_fusion.tests.comfyui.models import load

    return load(path)


@pytest.fixture
def exact_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no GPU is, eager forms stand in for the kernels: for tests about mounting, since the interpreter's row sums
    are not the CPU's."""
    import ideogram4_fusion.fusion.fusion
    import ideogram4_fusion.hosts.comfyui.quality
    from ideogram4_fusion.fusion.chains import load_chains
    from ideogram4_fusion.hosts.comfyui.blocks import HOST

    if not torch.cuda.is_available():
        eager = {
            name: dataclasses.replace(chain, fused=chain.eager, inexact=lambda device: None)
            for name, chain in load_chains().items()
        }
        monkeypatch.setattr(ideogram4_fusion.fusion.fusion, "load_chains", lambda: eager)
        assert HOST.attention is not None
        rope = HOST.attention.rope()
        stock = dataclasses.replace(rope, fused=rope.eager, inexact=lambda device: None)
        form = dataclasses.replace(HOST.attention, rope=lambda: stock)
        host = dataclasses.replace(HOST, attention=form)
        monkeypatch.setattr(ideogram4_fusion.hosts.comfyui.quality, "HOST", host)
