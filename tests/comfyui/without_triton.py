"""Run as a program: COMFYUI PACK MODELS. Loads the pack where Triton is not installed, renders ideogram4_instant8 at
256 x 256, and prints as one line of JSON what happened."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class Without:
    """A finder of a Python in which one package is not installed; keeps what was looked for in it."""

    def __init__(self, package: str, finder: Any, looked_for: list[str]) -> None:
        self.package = package
        self.finder = finder
        self.looked_for = looked_for

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] == self.package:
            self.looked_for.append(name)
            return None
        spec: ModuleSpec | None = self.finder.find_spec(name, path, target)
        return spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def main(comfyui: Path, pack: Path, models: Path) -> None:
    looked_for: list[str] = []
    sys.meta_path[:] = [Without("triton", finder, looked_for) for finder in sys.meta_path]
    _run(Path(__file__).resolve().parents[1] / "conftest.py")  # mounts the repository under its import name
    from ideogram4_fusion.benchmarks.comfyui_process import start_comfyui

    start_comfyui(comfyui, on_gpu=False, dynamic=False)
    import comfy.cli_args
    import comfy.model_management
    import folder_paths
    from ideogram4_fusion.tests.comfyui.executor import Core
    from ideogram4_fusion.tests.comfyui.graph import to_prompt
    from ideogram4_fusion.tests.comfyui.stand_ins import STAND_INS
    from ideogram4_fusion.tests.comfyui.workflow_files import read_workflow
    from PIL import Image

    import nodes

    # bf16 arithmetic on the CPU too, where core computes in fp32: only then is Triton asked for.
    comfy.cli_args.args.bf16_unet = True
    comfy.model_management.unet_manual_cast = lambda *args, **kwargs: None

    core = Core(models)
    known = set(nodes.NODE_CLASS_MAPPINGS)
    said = io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(said))
    before, start = len(looked_for), time.perf_counter()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        core.load_pack(pack)
    seconds = time.perf_counter() - start
    looked_for_while_loading = looked_for[before:]
    lines = said.getvalue().splitlines()

    nodes.NODE_CLASS_MAPPINGS.update(STAND_INS)
    prompt = to_prompt(read_workflow("ideogram4_instant8"), core.object_info)
    named = {entry["_meta"]["title"]: name for name, entry in prompt.items()}
    prompt[named["Empty Flux 2 Latent"]]["inputs"].update(width=256, height=256)
    shown = core.run(prompt)
    (image,) = shown[named["Save Image"]]["images"]
    with Image.open(Path(folder_paths.get_output_directory(), image["subfolder"], image["filename"])) as picture:
        size = picture.size
    told = {
        "nodes": [name for name in nodes.NODE_CLASS_MAPPINGS if name not in known],
        "lines": lines,
        "seconds": seconds,
        "looked_for_while_loading": looked_for_while_loading,
        "looked_for": looked_for[before:],
        "status": shown[named["Fusion status"]]["text"][0],
        "size": size,
    }
    print(json.dumps(told))


def _run(file: Path) -> None:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
