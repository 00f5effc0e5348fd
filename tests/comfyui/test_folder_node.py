"""Load Ideogram 4 Folder in graphs that core validates and executes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import folder_paths
import pytest
import torch
from ideogram4_fusion.hosts.comfyui.folder import find_folder, folder_names
from ideogram4_fusion.tests.comfyui.executor import Core, ExecutionFailed
from ideogram4_fusion.tests.comfyui.graph import Json

import nodes

pytest.importorskip("diffusers")
from ideogram4_fusion.tests.tiny_checkpoint import write_tiny_checkpoint

NAME = "owner/snapshots/tiny"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of models/diffusers with one checkpoint in it, and what is none."""
    models = tmp_path_factory.mktemp("models") / "diffusers"
    write_tiny_checkpoint(models / NAME)
    (models / "another model" / "unet").mkdir(parents=True)
    (models / "owner" / "again").symlink_to(models / "owner")  # round and round
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(folder_paths.folder_names_and_paths, "diffusers", ([str(models)], {"folder"}))
        yield models


def prompt(preset: str, **folder: Any) -> Json:
    """The folder's parts, a quality and a preset, to a picture."""
    model = ["quality", 0]
    return {
        "folder": {"class_type": "Ideogram4Fusion_LoadFolder", "inputs": {"load_unconditional": False, **folder}},
        "quality": {
            "class_type": "Ideogram4Fusion_FusionQuality",
            "inputs": {"model": ["folder", 0], "quality": "high"},
        },
        "text": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["folder", 1], "text": "a red cat"}},
        "latent": {"class_type": "EmptyFlux2LatentImage", "inputs": {"width": 128, "height": 64, "batch_size": 1}},
        "sampler": {
            "class_type": "Ideogram4Fusion_Sampler",
            "inputs": {
                "model": model,
                "positive": ["text", 0],
                "latent_image": ["latent", 0],
                "preset": preset,
                "seed": 3,
                "unconditional_model": ["folder", 4],
            },
        },
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["sampler", 0], "vae": ["folder", 2]}},
        "encode": {"class_type": "VAEEncode", "inputs": {"pixels": ["decode", 0], "vae": ["folder", 2]}},
        "keep": {"class_type": "Keep", "inputs": {"image": ["decode", 0], "latent": ["encode", 0]}},
        "found": {"class_type": "PreviewAny", "inputs": {"source": ["folder", 3]}},
    }


class Keep:
    OUTPUT_NODE = True
    RETURN_TYPES = ()
    FUNCTION = "keep"
    kept: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def INPUT_TYPES(cls) -> Json:
        return {"required": {"image": ("IMAGE",), "latent": ("LATENT",)}}

    def keep(self, image: torch.Tensor, latent: Json) -> Json:
        self.kept.append((image, latent["samples"]))
        return {}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pictures: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "Keep", type("Keep", (Keep,), {"kept": pictures}))
    return pictures


def test_only_checkpoints_are_offered(models: Path) -> None:
    assert NAME in folder_names()
    assert all(name.endswith("tiny") for name in folder_names())
    assert find_folder(NAME) == models / NAME


@pytest.mark.parametrize("preset", ["INSTANT_8", "DEFAULT_20"])
def test_a_graph_renders_from_the_folder(
    core: Core, models: Path, preset: str, kept: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    asked = prompt(preset, folder=NAME, load_unconditional=preset == "DEFAULT_20")
    assert core.errors(asked) == []
    shown = core.run(asked)
    ((image, latent),) = kept
    assert image.shape == (1, 64, 128, 3) and image.std() > 0.02
    assert latent.shape == (1, 128, 4, 8)
    text = shown["found"]["text"][0]
    assert "text encoder: row-wise fp8, 36 layers x 32" in text and "official row-wise fp8" in text
    assert ("not loaded" in text) == (preset == "INSTANT_8")


def test_a_guided_preset_says_where_the_second_model_comes_from(core: Core, models: Path, kept: Any) -> None:
    with pytest.raises(ExecutionFailed, match="load_unconditional"):
        core.run(prompt("DEFAULT_20", folder=NAME))


def test_a_folder_that_is_not_there_is_refused(core: Core, models: Path, kept: Any) -> None:
    errors = core.errors(prompt("INSTANT_8", folder="owner/other"))
    assert any(line.startswith("Value not in list: folder: 'owner/other'") for line in errors), errors
