"""ComfyUI's own main.py as a process on a free loopback port, with the pack in a base directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from ideogram4_fusion.tests.comfyui import stand_ins
from ideogram4_fusion.tests.comfyui.workflow_files import ROOT, write_models

_STAND_INS = """import nodes
from .stand_ins import STAND_INS

nodes.NODE_CLASS_MAPPINGS.update(STAND_INS)
NODE_CLASS_MAPPINGS = {}
"""
# No welcome dialog, no map over the graph, and text at every zoom.
_SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False, "LiteGraph.Canvas.MinFontSizeForLOD": 0}
_START_SECONDS = 120


def write_base(base: Path) -> None:
    """A base directory with the pack, stand-ins for text encoder and VAE, model files, and a user who has been here."""
    custom_nodes = base / "custom_nodes"
    (custom_nodes / "stand_ins").mkdir(parents=True)
    (custom_nodes / "ComfyUI-Ideogram4-Fusion").symlink_to(ROOT, target_is_directory=True)
    shutil.copy(stand_ins.__file__, custom_nodes / "stand_ins")
    (custom_nodes / "stand_ins" / "__init__.py").write_text(_STAND_INS, encoding="utf-8")
    write_models(base / "models")
    user = base / "user" / "default"
    user.mkdir(parents=True)
    (user / "comfy.settings.json").write_text(json.dumps(_SETTINGS), encoding="utf-8")


@contextlib.contextmanager
def serve(comfyui: Path, base: Path) -> Iterator[str]:
    """The address of a server that runs on the CPU, reaches nothing outside and writes below `base` only.

    Raises:
        RuntimeError: it ended, or did not answer within two minutes; with the end of its log.
    """
    address = f"http://127.0.0.1:{_free_port()}"
    command = [
        *(sys.executable, str(comfyui / "main.py"), "--cpu", "--disable-api-nodes"),
        *("--base-directory", str(base), "--database-url", "sqlite:///:memory:"),
        *("--listen", "127.0.0.1", "--port", address.rpartition(":")[2]),
    ]
    log = base / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        )
    try:
        _wait(process, address, log)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{address}/system_stats", timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"ComfyUI does not start:\n{log.read_text(errors='replace')[-3000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
