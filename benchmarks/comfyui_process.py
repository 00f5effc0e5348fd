"""Makes this process a ComfyUI without its server: its modules importable, its memory manager as main.py starts it."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from pathlib import Path


def start_comfyui(path: Path, *, on_gpu: bool, dynamic: bool) -> None:
    """Puts the ComfyUI at `path` on sys.path and starts it, writing into temporary folders only.

    Args:
        path: a ComfyUI checkout.
        on_gpu: False starts it with --cpu.
        dynamic: whether to turn dynamic VRAM on, main.py's default on an NVIDIA GPU.

    Raises:
        FileNotFoundError: no ComfyUI at `path`.
        RuntimeError: dynamic VRAM was asked for and does not start.
    """
    if not (path / "comfy" / "sd.py").is_file():
        raise FileNotFoundError(f"no ComfyUI at {path}")
    arguments = ["comfyui", "--database-url", "sqlite:///:memory:"]
    if not on_gpu:
        arguments.append("--cpu")
    sys.path.insert(0, str(path))
    before, sys.argv = sys.argv, arguments
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args
    finally:
        sys.argv = before
    _write_elsewhere()
    if dynamic:
        _start_dynamic_vram()


def _write_elsewhere() -> None:
    """Sends everything that core would write beside its code to a folder that goes when the process ends."""
    import folder_paths

    scratch = Path(tempfile.mkdtemp(prefix="ideogram4-fusion-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    for name in ("output", "temp", "input", "user"):
        folder = scratch / name
        folder.mkdir()
        getattr(folder_paths, f"set_{name}_directory")(str(folder))


def _start_dynamic_vram() -> None:
    import comfy_aimdo.control

    comfy_aimdo.control.init()
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    devices = ((device.index, 0) for device in comfy.model_management.get_all_torch_devices())
    if not comfy_aimdo.control.init_devices(devices):
        raise RuntimeError("comfy-aimdo does not start on this machine")
    comfy_aimdo.control.set_log_warning()
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True
