"""The nodes as core sees them: what saved workflows depend on, what validation says, and that they agree with core's
own nodes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ideogram4_fusion.tests.comfyui.executor import Core, ExecutionFailed
from ideogram4_fusion.tests.comfyui.graph import Json, to_prompt
from ideogram4_fusion.tests.comfyui.stand_ins import STAND_INS
from ideogram4_fusion.tests.comfyui.workflow_files import ROOT, read_workflow, write_models

import nodes

# Saved workflows hold these: an entry may be added at the end of a node's inputs or outputs, none may change.
FROZEN: dict[str, tuple[list[str], list[str]]] = {
    "Ideogram4Fusion_LoadModel": (["unet_name", "row_wise_weights"], ["MODEL", "STRING"]),
    "Ideogram4Fusion_LoadFolder": (
        ["folder", "load_unconditional", "row_wise_weights"],
        ["MODEL", "CLIP", "VAE", "STRING", "MODEL"],
    ),
    "Ideogram4Fusion_LoadLora": (["model", "lora_name", "strength_model"], ["MODEL", "STRING"]),
    "Ideogram4Fusion_RawTextTaps": (["clip"], ["CLIP", "STRING"]),
    "Ideogram4Fusion_FusionQuality": (
        ["model", "quality", "attention", "fast_accumulation", "row_wise_fp8", "unproven_chains"],
        ["MODEL", "STRING"],
    ),
    "Ideogram4Fusion_Preset": (
        ["model", "positive", "latent_image", "preset", "unconditional_model"],
        ["GUIDER", "SAMPLER", "SIGMAS", "STRING"],
    ),
    "Ideogram4Fusion_Sampler": (
        ["model", "positive", "latent_image", "preset", "seed", "unconditional_model"],
        ["LATENT", "STRING"],
    ),
    "Ideogram4Fusion_CompareQuality": (
        [
            *("model", "positive", "latent_image", "vae", "preset", "seed", "quality_a", "quality_b"),
            "unconditional_model",
        ],
        ["IMAGE", "IMAGE", "IMAGE", "IMAGE", "STRING", "FLOAT"],
    ),
}
FROZEN_OPTIONS = {
    "row_wise_weights": ["auto", "bf16", "fp8"],
    "quality": ["off", "lossless", "high"],
    "preset": ["INSTANT_8", "FAST_20", "DEFAULT_20", "QUALITY_48", "TURBO_12"],
}
NODES = list(FROZEN)
LAST_SEED = 0xFFFFFFFFFFFFFFFF


class Keep:
    """An output node that keeps what it is given."""

    OUTPUT_NODE = True
    RETURN_TYPES = ()
    FUNCTION = "keep"
    kept: dict[str, torch.Tensor]

    @classmethod
    def INPUT_TYPES(cls) -> Json:
        return {"required": {"latent": ("LATENT",), "name": ("STRING", {})}}

    def keep(self, latent: Json, name: str) -> Json:
        self.kept[name] = latent["samples"].clone()
        return {}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The latents that the Keep nodes of a run were given, by their name."""
    latents: dict[str, torch.Tensor] = {}
    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "Keep", type("Keep", (Keep,), {"kept": latents}))
    for node, stand_in in STAND_INS.items():
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, node, stand_in)
    return latents


@pytest.fixture
def prompt(core: Core) -> Json:
    """ideogram4_instant8 at 256 x 256, with the one-node sampler and the comparison on the same inputs."""
    prompt = to_prompt(read_workflow("ideogram4_instant8"), core.object_info)
    prompt[find(prompt, "EmptyFlux2LatentImage")]["inputs"].update(width=256, height=256)
    preset = prompt[find(prompt, "Ideogram4Fusion_Preset")]["inputs"]
    seed = prompt[find(prompt, "RandomNoise")]["inputs"]["noise_seed"]
    prompt["one_node"] = {"class_type": "Ideogram4Fusion_Sampler", "inputs": {**preset, "seed": seed}}
    prompt["compare"] = {
        "class_type": "Ideogram4Fusion_CompareQuality",
        "inputs": {
            **preset,
            "vae": [find(prompt, "VAELoader"), 0],
            "seed": seed,
            "quality_a": "lossless",
            "quality_b": "high",
        },
    }
    prompt["kept"] = {"class_type": "Keep", "inputs": {"latent": ["one_node", 0], "name": "one node"}}
    return prompt


def find(prompt: Json, kind: str) -> str:
    """The first node of a type."""
    return next(name for name, node in prompt.items() if node["class_type"] == kind)


def only(prompt: Json, *outputs: str) -> Json:
    """The prompt with these output nodes alone."""
    wanted: Json = {}
    todo = list(outputs)
    while todo:
        name = todo.pop()
        wanted[name] = prompt[name]
        todo += [value[0] for value in prompt[name]["inputs"].values() if isinstance(value, list)]
    return wanted


def test_ids_inputs_and_outputs_are_frozen(core: Core) -> None:
    ours = {name: info for name, info in core.object_info.items() if name.startswith("Ideogram4Fusion_")}
    assert list(ours) == NODES
    for name, info in ours.items():
        inputs = [*info["input"]["required"], *info["input"].get("optional", {})]
        assert (inputs, info["output"]) == FROZEN[name]


@pytest.mark.parametrize("node", NODES)
def test_a_user_can_find_and_read_it(node: str, core: Core) -> None:
    info = core.object_info[node]
    assert info["category"] == "Ideogram 4 Fusion"
    assert info["display_name"] and info["description"].endswith(".") and "ideogram" in info["search_aliases"]
    for declared in {**info["input"]["required"], **info["input"].get("optional", {})}.values():
        assert declared[1]["tooltip"].endswith(".")
    assert all(info["output_name"]) and len(set(info["output_name"])) == len(info["output_name"])
    for kind, name, tooltip in zip(info["output"], info["output_name"], info["output_tooltips"], strict=True):
        assert tooltip or name == kind or name in ("image_a", "image_b")


@pytest.mark.parametrize("node", NODES)
def test_options_are_frozen(node: str, core: Core) -> None:
    for name, (_, spec) in core.object_info[node]["input"]["required"].items():
        for prefix, options in FROZEN_OPTIONS.items():
            if name.startswith(prefix):
                assert spec["options"] == options and spec["default"] in options


def test_the_prompt_of_these_tests_is_valid(core: Core, prompt: Json, kept: Any) -> None:
    assert core.errors(prompt) == []


@pytest.mark.parametrize("node", ["one_node", "compare"])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("seed", -1, "Value -1 smaller than min of 0: seed"),
        ("seed", LAST_SEED + 1, f"Value {LAST_SEED + 1} bigger than max of {LAST_SEED}: seed"),
        ("seed", "lucky", "Failed to convert an input value to a INT value: seed, lucky"),
        ("preset", "INSTANT_9", "Value not in list: preset: 'INSTANT_9' not in ['INSTANT_8', "),
        ("model", ["CLIPLoader", 0], "Return type mismatch between linked nodes: model, received_type(CLIP) mismatch"),
        ("model", None, "Required input is missing: model"),
        ("positive", None, "Required input is missing: positive"),
        ("preset", None, "Required input is missing: preset"),
    ],
)
def test_a_wrong_input_is_refused_in_words(
    node: str, name: str, value: Any, said: str, core: Core, prompt: Json, kept: Any
) -> None:
    changed = copy.deepcopy(prompt)
    if value is None:
        del changed[node]["inputs"][name]
    else:
        changed[node]["inputs"][name] = [find(prompt, value[0]), value[1]] if isinstance(value, list) else value
    assert any(line.startswith(said) for line in core.errors(changed)), core.errors(changed)


def test_unknown_quality_and_unknown_file_are_refused(core: Core, prompt: Json, kept: Any) -> None:
    prompt["compare"]["inputs"]["quality_b"] = "best"
    prompt[find(prompt, "Ideogram4Fusion_LoadModel")]["inputs"]["unet_name"] = "ideogram.ckpt"
    errors = core.errors(prompt)
    assert "Value not in list: quality_b: 'best' not in ['off', 'lossless', 'high']" in errors
    assert any(line.startswith("Value not in list: unet_name: 'ideogram.ckpt' not in ") for line in errors)


def test_a_guided_preset_without_its_second_model_says_what_to_do(core: Core, prompt: Json, kept: Any) -> None:
    prompt["one_node"]["inputs"]["preset"] = "DEFAULT_20"
    with pytest.raises(ExecutionFailed, match="DEFAULT_20 guides with the unconditional Ideogram 4 model: connect it"):
        core.run(only(prompt, "kept"))


def test_every_way_to_sample_a_preset_gives_the_same_bytes(
    core: Core, prompt: Json, kept: dict[str, torch.Tensor]
) -> None:
    """One node; Preset with Sampler Custom Advanced; and core's own guider, sampler and Ideogram 4 scheduler."""
    by_preset = find(prompt, "SamplerCustomAdvanced")
    advanced = prompt[by_preset]["inputs"]
    preset = prompt["one_node"]["inputs"]
    prompt |= {
        "guider": {
            "class_type": "BasicGuider",
            "inputs": {"model": preset["model"], "conditioning": preset["positive"]},
        },
        "euler": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
        "sigmas": {
            "class_type": "Ideogram4Scheduler",
            "inputs": {"steps": 8, "width": 256, "height": 256, "mu": 0.0, "std": 1.75},
        },
        "by_core": {
            "class_type": "SamplerCustomAdvanced",
            "inputs": {**advanced, "guider": ["guider", 0], "sampler": ["euler", 0], "sigmas": ["sigmas", 0]},
        },
    }
    for node, name in ((by_preset, "preset"), ("by_core", "core")):
        prompt[name] = {"class_type": "Keep", "inputs": {"latent": [node, 0], "name": name}}
    core.run(only(prompt, "kept", "preset", "core"))
    assert kept["one node"].shape == (1, 128, 16, 16) and kept["one node"].std() > 0.1
    assert torch.equal(kept["preset"], kept["one node"])
    assert torch.equal(kept["core"], kept["one node"])


@pytest.fixture(scope="module")
def without_triton(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """What without_triton.py tells of the pack in a folder with a name that is no Python name."""
    folder = tmp_path_factory.mktemp("custom nodes")
    pack = folder / "ComfyUI-Ideogram 4 Fusion v0.1 (beta)"
    pack.symlink_to(ROOT, target_is_directory=True)
    write_models(folder / "models")
    script = Path(__file__).with_name("without_triton.py")
    done = subprocess.run(
        [sys.executable, str(script), os.environ["COMFYUI_PATH"], str(pack), str(folder / "models")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_pack_loads_from_any_folder(without_triton: Json) -> None:
    assert without_triton["nodes"] == NODES
    assert len(without_triton["lines"]) <= 1
    assert without_triton["seconds"] < 2


def test_loading_the_pack_does_not_look_for_triton(without_triton: Json) -> None:
    assert without_triton["looked_for_while_loading"] == []


def test_without_triton_everything_renders_and_the_status_says_why(without_triton: Json) -> None:
    assert without_triton["status"] == "stock: Triton is not installed (on Windows: pip install triton-windows)"
    assert without_triton["size"] == [256, 256]
    assert "triton" in without_triton["looked_for"]
