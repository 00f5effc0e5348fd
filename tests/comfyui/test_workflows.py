"""The shipped workflows: what they hold, how they look, and that the real executor runs each of them unchanged."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import comfy.model_base
import folder_paths
import pytest
import torch
from ideogram4_fusion.demo_model import colours, posters
from ideogram4_fusion.demo_model.captions import json_caption
from ideogram4_fusion.fusion.fusion import QUALITIES
from ideogram4_fusion.hosts.diffusers.default_prompt import DEFAULT_PROMPT
from ideogram4_fusion.hosts.diffusers.demo import DEMO_CHECKPOINT
from ideogram4_fusion.sampling.presets import PRESETS
from ideogram4_fusion.tests.comfyui.executor import Core
from ideogram4_fusion.tests.comfyui.graph import Json, to_prompt, widget_problems
from ideogram4_fusion.tests.comfyui.layout import groups_around, overlaps
from ideogram4_fusion.tests.comfyui.stand_ins import STAND_INS
from ideogram4_fusion.tests.comfyui.workflow_files import DEMO, WORKFLOWS, link_demo, read_workflow
from PIL import Image

import nodes

COMPARE = "ideogram4_compare_lossless_high"
SIDE = 1024

NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

every_workflow = pytest.mark.parametrize("name", WORKFLOWS)
with_published_weights = pytest.mark.parametrize("name", [name for name in WORKFLOWS if name != DEMO])


@pytest.fixture(scope="module", autouse=True)
def demo_folder(core: Core, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """models/diffusers with the demo's checkpoint in it, as its workflow's note says."""
    diffusers = tmp_path_factory.mktemp("models") / "diffusers"
    link_demo(diffusers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(folder_paths.folder_names_and_paths, "diffusers", ([str(diffusers)], {"folder"}))
        patch.delitem(vars(core), "object_info", raising=False)  # what was offered before
        yield


@pytest.fixture
def model_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch size of every call of the model, from now on."""
    calls: list[int] = []
    apply_model = comfy.model_base.BaseModel.apply_model

    def counted(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(x.shape[0])
        return apply_model(self, x, *args, **kwargs)

    monkeypatch.setattr(comfy.model_base.BaseModel, "apply_model", counted)
    return calls


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text encoder and VAE are stand-ins; the diffusion model's loader is the pack's own."""
    for node, stand_in in STAND_INS.items():
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, node, stand_in)


def test_names() -> None:
    """Users, and the pages that link to them, know these files by name."""
    assert WORKFLOWS == [COMPARE, DEMO, "ideogram4_fast20", "ideogram4_instant8"]


@every_workflow
def test_core_accepts_it(name: str, core: Core) -> None:
    assert core.errors(to_prompt(read_workflow(name), core.object_info)) == []


@every_workflow
def test_every_widget_holds_a_value_that_the_editor_allows(name: str, core: Core) -> None:
    assert widget_problems(read_workflow(name), core.object_info) == []


@every_workflow
def test_links_join_sockets_of_one_type(name: str, core: Core) -> None:
    workflow = read_workflow(name)
    by_id = {node["id"]: node for node in workflow["nodes"]}
    for link, origin, origin_slot, target, target_slot, kind in workflow["links"]:
        output, socket = by_id[origin]["outputs"][origin_slot], by_id[target]["inputs"][target_slot]
        info = core.object_info[by_id[target]["type"]]["input"]
        declared = {**info.get("required", {}), **info.get("optional", {})}[socket["name"]][0]
        assert link in output["links"] and socket["link"] == link
        assert core.object_info[by_id[origin]["type"]]["output"][origin_slot] == output["type"] == kind
        assert declared in (kind, "*") and socket["type"] == declared
    assert workflow["last_link_id"] == max(link[0] for link in workflow["links"])
    assert workflow["last_node_id"] == max(by_id) and len(by_id) == len(workflow["nodes"])


@every_workflow
def test_nothing_overlaps_and_groups_read_from_left_to_right(name: str) -> None:
    workflow = read_workflow(name)
    assert overlaps(workflow) == []
    group = {node["id"]: groups_around(workflow, node) for node in workflow["nodes"]}
    for node in workflow["nodes"]:
        assert len(group[node["id"]]) == (0 if node["type"] == "MarkdownNote" else 1), node["type"]
    assert all(group[origin] <= group[target] for _, origin, _, target, _, _ in workflow["links"])


@with_published_weights
def test_missing_models_can_be_downloaded(name: str) -> None:
    """The editor offers a file when a widget's value is the name of one of the node's models."""
    loaders = [node for node in read_workflow(name)["nodes"] if "Load" in node["type"]]
    assert len(loaders) == 3
    for node in loaders:
        (model,) = node["properties"]["models"]
        assert node["widgets_values"][0] == model["name"]
        assert model["directory"] in folder_paths.folder_names_and_paths
        assert model["url"].startswith("https://huggingface.co/")
        assert Path(model["url"]).name == Path(model["name"]).name


@with_published_weights
def test_its_note_tells_what_a_user_must_know(name: str) -> None:
    workflow = read_workflow(name)
    note = _node(workflow, "MarkdownNote")["widgets_values"][0]
    (preset,) = {value for node in workflow["nodes"] for value in node["widgets_values"] if value in PRESETS}
    models = [model for node in workflow["nodes"] for model in node["properties"].get("models", [])]
    told = [
        preset,
        PRESETS[preset].checkpoint,
        f"{PRESETS[preset].steps} steps",
        "guidance 1.0",
        "gated",
        "non-commercial",
        *(f"**{quality}**" for quality in QUALITIES),
        *(part for model in models for part in (model["directory"], model["name"].split("/")[0])),
    ]
    assert [fact for fact in told if fact not in note] == []


@with_published_weights
def test_the_caption_is_one_that_ideogram_4_was_trained_on(name: str) -> None:
    """Keys, their order and their limits are those of Ideogram's own caption_verifier.py."""
    workflow = read_workflow(name)
    text = _node(workflow, "PrimitiveStringMultiline")["widgets_values"][0]
    caption = json.loads(text)
    assert text == json.dumps(caption, ensure_ascii=False, separators=(",", ":"))
    assert list(caption) == ["high_level_description", "style_description", "compositional_deconstruction"]
    style, composition = caption["style_description"], caption["compositional_deconstruction"]
    assert list(style) in (
        ["aesthetics", "lighting", "photo", "medium", "color_palette"],
        ["aesthetics", "lighting", "medium", "art_style", "color_palette"],
    )
    assert list(composition) == ["background", "elements"]
    keys = {"obj": ["type", "bbox", "desc", "color_palette"], "text": ["type", "bbox", "text", "desc", "color_palette"]}
    for element in composition["elements"]:
        assert list(element) == keys[element["type"]]
        top, left, bottom, right = element["bbox"]
        assert 0 <= top < bottom <= 1000 and 0 <= left < right <= 1000
        assert len(element["color_palette"]) <= 5
    colours = [style["color_palette"], *(element["color_palette"] for element in composition["elements"])]
    assert len(style["color_palette"]) <= 16
    for colour in itertools.chain.from_iterable(colours):
        assert len(colour) == 7 and colour == "#" + f"{int(colour[1:], 16):06X}"


def test_the_demo_asks_for_its_own_model_and_for_no_other() -> None:
    workflow = read_workflow(DEMO)
    (loader,) = (node for node in workflow["nodes"] if "Load" in node["type"])
    assert loader["type"] == "Ideogram4Fusion_LoadFolder"
    # As fp8: else `high` has nothing of its own to do on a GPU.
    assert loader["widgets_values"] == ["ideogram4-demo", False, "fp8"]
    assert not any("models" in node["properties"] for node in workflow["nodes"])
    assert _node(workflow, "EmptyFlux2LatentImage")["widgets_values"] == [posters.SIDE, posters.SIDE, 1]


def test_the_demo_s_note_tells_what_a_user_must_know() -> None:
    workflow = read_workflow(DEMO)
    note = _node(workflow, "MarkdownNote")["widgets_values"][0]
    (folder, *_) = _node(workflow, "Ideogram4Fusion_LoadFolder")["widgets_values"]
    preset = _node(workflow, "Ideogram4Fusion_CompareQuality")["widgets_values"][0]
    megabytes = round(sum(file.stat().st_size for file in DEMO_CHECKPOINT.rglob("*") if file.is_file()) / 1e6)
    told = [
        f"{megabytes} MB",
        "not with the registry's archive",
        f"ln -s <pack>/demo_model/checkpoint <ComfyUI>/models/diffusers/{folder}",
        "On Windows copy the folder",
        f"{posters.SIDE} x {posters.SIDE} pixels",
        f"{NUMBERS[len(colours.NAMES)].capitalize()} colours: {', '.join(colours.NAMES)}.",
        f"({', '.join(posters.KINDS)})",
        f"three to {NUMBERS[posters.LONGEST_WORD]} capital letters",
        f"**{preset}**",
        f"{PRESETS[preset].steps} steps",
        "guidance 1.0",
        "Without an NVIDIA GPU nothing is fused",
    ]
    assert [fact for fact in told if fact not in note] == []


def test_every_note_says_the_same_of_the_qualities() -> None:
    notes = [_node(read_workflow(name), "MarkdownNote")["widgets_values"][0].splitlines() for name in WORKFLOWS]
    said = [[line for quality in QUALITIES for line in note if line.startswith(f"- **{quality}**: ")] for note in notes]
    assert len(said[0]) == len(QUALITIES) and all(lines == said[0] for lines in said)


def test_the_demo_s_caption_is_one_that_its_model_was_trained_on() -> None:
    """Its keys are those of a caption with boxes, and it names nothing that the posters do not show."""
    text = _node(read_workflow(DEMO), "PrimitiveStringMultiline")["widgets_values"][0]
    assert text == DEFAULT_PROMPT
    caption, random = json.loads(text), Random(0)
    drawn = [poster for poster in (posters.random_poster(random) for _ in range(200)) if poster.boxed]
    assert _keys(caption) in [_keys(json.loads(json_caption(poster, random))) for poster in drawn]
    composition = caption["compositional_deconstruction"]
    assert set(composition["background"].split()) & set(colours.NAMES)
    for element in composition["elements"]:
        named = element["desc"].split()
        assert set(named) & set(colours.NAMES)
        top, left, bottom, right = element["bbox"]
        assert 0 <= top < bottom <= 1000 and 0 <= left < right <= 1000
        if element["type"] == "obj":
            assert named[-1] in posters.KINDS
        else:
            assert 3 <= len(element["text"]) <= posters.LONGEST_WORD
            assert element["text"].isalpha() and element["text"].isupper()


@pytest.mark.parametrize("name", ["ideogram4_instant8", "ideogram4_fast20"])
def test_it_renders(name: str, core: Core, stand_ins: None, model_calls: list[int]) -> None:
    workflow = read_workflow(name)
    shown = core.run(to_prompt(workflow, core.object_info))
    preset = PRESETS[_node(workflow, "Ideogram4Fusion_Preset")["widgets_values"][0]]
    assert model_calls == [1] * preset.steps
    assert _sizes(shown, _node(workflow, "SaveImage")) == [(SIDE, SIDE)]
    assert _text(shown, workflow, "Layout of the file") == "bf16 weights, split q, k, v, 2 layers x 128"
    status = _text(shown, workflow, "Fusion status")
    assert core.shown_on(str(_node(workflow, "Ideogram4Fusion_FusionQuality")["id"]))[0] == status
    if not torch.cuda.is_available():
        assert status == "stock: the model computes in float32 here, the kernels in bfloat16"


def test_it_compares(core: Core, stand_ins: None, model_calls: list[int]) -> None:
    workflow = read_workflow(COMPARE)
    shown = core.run(to_prompt(workflow, core.object_info))
    assert model_calls == [1] * 2 * (1 + PRESETS["INSTANT_8"].steps)  # each side: one step of warm-up, then all
    assert _sizes(shown, _node(workflow, "ImageCompare"), "a_images", "b_images") == [(SIDE, SIDE)] * 2
    ((width, height),) = _sizes(shown, _node(workflow, "SaveImage"))
    assert width >= 2 * SIDE and height > SIDE
    ((width, height),) = _sizes(shown, _node(workflow, "PreviewImage"))
    assert width >= SIDE and height > SIDE
    report = _text(shown, workflow, "Report")
    verdict = report.splitlines()[0]
    assert core.shown_on(str(_node(workflow, "Ideogram4Fusion_CompareQuality")["id"])) == [verdict]
    assert "\nA: lossless\n" in report and "\nB: high\n" in report and "\nsize: 1024 x 1024 pixels\n" in report
    if torch.cuda.is_available():
        assert verdict.startswith(("IDENTICAL: ", "CLOSE: ", "NOT CLOSE: "))
    else:
        reason = "the model computes in float32 here, the kernels in bfloat16"
        assert verdict == f"NOT COMPARED: nothing was fused ({reason})"
        assert _text(shown, workflow, "PSNR in dB") == "nan"


def test_the_demo_compares(core: Core, model_calls: list[int]) -> None:
    """With its own model, text encoder and VAE."""
    workflow = read_workflow(DEMO)
    shown = core.run(to_prompt(workflow, core.object_info))
    assert model_calls == [1] * 2 * (1 + PRESETS["INSTANT_8"].steps)
    pictures = _pictures(shown, _node(workflow, "ImageCompare"), "a_images", "b_images")
    assert [picture.size for picture in pictures] == [(posters.SIDE, posters.SIDE)] * 2
    for picture in pictures:
        assert [_named(picture, *spot) for spot in ((16, 16), (125, 90), (240, 240))] == ["blue", "yellow", "purple"]
    ((width, height),) = _sizes(shown, _node(workflow, "SaveImage"))
    assert width >= 2 * posters.SIDE and height > posters.SIDE
    found = _text(shown, workflow, "What the folder holds")
    assert found.startswith("transformer: official row-wise fp8") and "text encoder: " in found and "vae: " in found
    report = _text(shown, workflow, "Report")
    verdict = report.splitlines()[0]
    assert "\nA: lossless\n" in report and "\nB: high\n" in report and "\nsize: 256 x 256 pixels\n" in report
    if torch.cuda.is_available():
        assert verdict.startswith(("IDENTICAL: ", "CLOSE: "))
    else:
        reason = "the model computes in float32 here, the kernels in bfloat16"
        assert verdict == f"NOT COMPARED: nothing was fused ({reason})"
        assert pictures[0].tobytes() == pictures[1].tobytes()


def _node(workflow: Json, kind: str) -> Json:
    (node,) = (node for node in workflow["nodes"] if node["type"] == kind)
    return node


def _text(shown: dict[str, Json], workflow: Json, title: str) -> str:
    (node,) = (node for node in workflow["nodes"] if node.get("title") == title)
    (text,) = shown[str(node["id"])]["text"]
    return text


def _sizes(shown: dict[str, Json], node: Json, *keys: str) -> list[tuple[int, int]]:
    return [picture.size for picture in _pictures(shown, node, *keys)]


def _pictures(shown: dict[str, Json], node: Json, *keys: str) -> list[Image.Image]:
    files = [file for key in keys or ("images",) for file in shown[str(node["id"])][key]]
    paths = [Path(folder_paths.get_directory_by_type(f["type"]), f["subfolder"], f["filename"]) for f in files]
    return [Image.open(path).convert("RGB") for path in paths]


def _named(picture: Image.Image, x: int, y: int) -> str:
    """The named colour next to that of a pixel."""
    pixel = picture.getpixel((x, y))
    assert isinstance(pixel, tuple)
    return min(colours.NAMES, key=lambda name: math.dist(colours.RGB[name], pixel))


def _keys(caption: Any) -> Any:
    """A caption's keys in their order, and the types of its elements."""
    if isinstance(caption, dict):
        return [(key, value if key == "type" else _keys(value)) for key, value in caption.items()]
    return [_keys(item) for item in caption] if isinstance(caption, list) else None
