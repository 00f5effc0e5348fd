"""The shipped workflows, and what they ask for: a tiny checkpoint, placeholders, the demo's own model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ideogram4_fusion.hosts.diffusers.demo import DEMO_CHECKPOINT
from ideogram4_fusion.tests.comfyui.stand_ins import FEATURES
from ideogram4_fusion.tests.tiny import split_names, tiny_config, tiny_state_dict, write_file

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
DEMO = "ideogram4_demo"  # the one whose model comes with a clone


def read_workflow(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))


def wanted_models() -> list[dict[str, str]]:
    """name, url and directory of every model file that a workflow lets the editor offer for download."""
    nodes = [node for name in WORKFLOWS for node in read_workflow(name)["nodes"]]
    return [model for node in nodes for model in node["properties"].get("models", [])]


def write_models(models: Path) -> None:
    """Fills a models folder: each diffusion model is a tiny one under diffusers' names, as fal publishes its own."""
    for model in wanted_models():
        path = models / model["directory"] / model["name"]
        if model["directory"] == "diffusion_models":
            _write_checkpoint(path)
        else:
            write_file(path, {})
    link_demo(models / "diffusers")


def link_demo(diffusers: Path) -> None:
    """Puts the demo's checkpoint into a folder of checkpoints as the note of its workflow says."""
    (loader,) = (node for node in read_workflow(DEMO)["nodes"] if node["type"] == "Ideogram4Fusion_LoadFolder")
    diffusers.mkdir(parents=True, exist_ok=True)
    (diffusers / loader["widgets_values"][0]).symlink_to(DEMO_CHECKPOINT, target_is_directory=True)


def _write_checkpoint(path: Path) -> None:
    config = tiny_config(llm_features_dim=FEATURES)
    tensors = sorted(split_names({k: v.bfloat16() for k, v in tiny_state_dict(config).items()}).items())
    shard = re.fullmatch(r"(.+-)00001(-of-(\d{5})\.safetensors)", path.name)
    paths = [path]
    if shard:
        paths = [path.with_name(f"{shard[1]}{i + 1:05}{shard[2]}") for i in range(int(shard[3]))]
    for i, file in enumerate(paths):
        write_file(file, dict(tensors[i :: len(paths)]), config)
