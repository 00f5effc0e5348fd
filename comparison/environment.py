"""What a measurement was made with."""

from __future__ import annotations

import platform
from importlib import metadata

import torch


def describe_environment(device: torch.device | str) -> dict[str, str]:
    """Versions of Python, torch, CUDA (or ROCm) and Triton, and the name of `device`.

    Triton's version is read from its package data: it is not imported. A host adds its own version to the result.
    """
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.hip:
        found["rocm"] = torch.version.hip
    else:
        found["cuda"] = torch.version.cuda or "none"
    found["triton"] = _triton_version()
    found["gpu"] = _device_name(torch.device(device))
    return found


def _triton_version() -> str:
    for distribution in ("triton", "triton-windows"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"none ({device.type})"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return f"{properties.name} ({properties.gcnArchName})"
    return f"{properties.name} (sm_{properties.major}{properties.minor})"
