"""The demo's model: its posters, captions and text features, and its training as far as a CPU goes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from diffusers import Ideogram4Pipeline
from ideogram4_fusion.checkpoint.folder import CheckpointFolder
from ideogram4_fusion.demo_model.captions import random_caption
from ideogram4_fusion.demo_model.drawing import as_rows, draw
from ideogram4_fusion.demo_model.examples import held_out, training_set
from ideogram4_fusion.demo_model.export import write_text_parts, write_transformer
from ideogram4_fusion.demo_model.measure import background_is_right, shape_is_right
from ideogram4_fusion.demo_model.posters import SIDE, random_poster
from ideogram4_fusion.demo_model.sample import read_sheet, save_sheet
from ideogram4_fusion.demo_model.text_encoder import text_features, tokenise
from ideogram4_fusion.demo_model.tokenizer import make_tokenizer
from ideogram4_fusion.demo_model.transformer import layout, new_transformer, rounded
from ideogram4_fusion.hosts.diffusers.conditioning import load_text_encoder
from ideogram4_fusion.hosts.diffusers.load import load_transformer
from transformers import AutoTokenizer

CPU = torch.device("cpu")
PLAIN = "a red star on blue, the word HELLO"


def text_parts(root: Path) -> CheckpointFolder:
    write_text_parts(root)
    return CheckpointFolder(root, root / "transformer", None, root / "text_encoder", root / "tokenizer", root / "vae")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    return text_parts(tmp_path_factory.mktemp("demo"))


def test_elements_lie_within_the_poster_and_apart() -> None:
    random = Random(3)
    for _ in range(500):
        poster = random_poster(random)
        word = poster.word.box
        assert word[0] >= 0 and word[1] >= 0 and word[2] <= SIDE and word[3] <= SIDE
        for shape in poster.shapes:
            left, top, right, bottom = shape.box
            assert left >= 0 and top >= 0 and right <= SIDE and bottom <= SIDE
            assert bottom <= word[1] or top >= word[3]
        if len(poster.shapes) == 2:
            assert poster.shapes[0].box[2] <= poster.shapes[1].box[0]


def test_json_captions_are_in_the_models_schema() -> None:
    random = Random(4)
    captions = [random_caption(random_poster(random), random) for _ in range(300)]
    structured = [json.loads(caption) for caption in captions if caption.startswith("{")]
    assert 0 < len(structured) < len(captions)
    for caption in structured:
        assert list(caption) in (
            ["high_level_description", "compositional_deconstruction"],
            ["compositional_deconstruction"],
        )
        assert list(caption["compositional_deconstruction"]) == ["background", "elements"]
        for element in caption["compositional_deconstruction"]["elements"]:
            keys = ["type", "text", "desc"] if element["type"] == "text" else ["type", "desc"]
            assert [key for key in element if key != "bbox"] == keys
            assert list(element)[1] == "bbox" or "bbox" not in element
            assert all(type(side) is int and 0 <= side <= 1000 for side in element.get("bbox", ()))


def test_held_out_words_are_not_trained_on() -> None:
    held = held_out()
    assert held == held_out()
    words = {each.poster.word.letters for each in held}
    assert words.isdisjoint(each.poster.word.letters for each in training_set(2000, 0))


def test_drawn_posters_are_what_the_measure_finds_right() -> None:
    posters = [each.poster for each in held_out()[:20]]
    pictures = ((draw(as_rows(posters)) + 1.0) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
    for picture, poster, other in zip(pictures, posters, posters[1:] + posters[:1], strict=True):
        assert background_is_right(picture, poster)
        assert all(shape_is_right(picture, poster, shape) for shape in poster.shapes)
        if other.background.first != poster.background.first:
            assert not background_is_right(picture, other)


def test_tokenizer_has_one_token_for_a_value_and_takes_any_text() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.tokenize('"bbox":[0,57,1000],') == ['"bbox":[', "0", ",", "57", ",", "1000", "],"]
    assert tokenizer.tokenize("the word HELLO")[-5:] == list("HELLO")
    assert tokenizer.decode(tokenizer("Grüße, 日本 sunset 2077!")["input_ids"]) == "Grüße,日本 sunset 2077!"
    caption = {"compositional_deconstruction": {"background": "blue", "elements": []}}
    compact = json.dumps(caption, separators=(",", ":"))
    assert tokenizer.tokenize(json.dumps(caption, indent=2)) == tokenizer.tokenize(compact)


def test_features_are_those_of_the_pipeline(folder: CheckpointFolder) -> None:
    encoder = load_text_encoder(folder, CPU)
    tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer, local_files_only=True)
    prompts = [held_out()[0].caption, PLAIN]
    ids = tokenise(tokenizer, prompts)
    length = max(map(len, ids)) + 3
    pipeline = Ideogram4Pipeline(None, None, encoder, tokenizer, None, None)
    expected, positions, segments, indicator = pipeline.encode_prompt(prompts, 16, 16, length, CPU)
    features = text_features(encoder, ids, length)
    assert torch.equal(features.float(), expected[:, :length])
    assert features.count_nonzero() > 0
    found = layout(torch.tensor([len(each) for each in ids]), length, 16)
    assert all(torch.equal(a, b) for a, b in zip(found, (positions, segments, indicator), strict=True))


def test_training_sees_the_weights_that_a_host_loads(folder: CheckpointFolder) -> None:
    torch.manual_seed(0)
    model = new_transformer()
    torch.nn.init.normal_(model.final_layer.linear.weight)
    write_transformer(folder.root, model.state_dict())
    loaded, checkpoint = load_transformer(folder.transformer / "diffusion_pytorch_model.safetensors", CPU)
    assert checkpoint.describe() == "official row-wise fp8, fused qkv, 6 layers x 384"
    weights = dict(loaded.named_parameters())
    for name in ("layers.3.attention.to_k.weight", "final_layer.linear.weight", "llm_cond_proj.weight"):
        assert torch.equal(rounded(model.get_parameter(name)), weights[name])


def test_gradient_passes_through_the_rounding() -> None:
    weight = torch.randn(4, 8, requires_grad=True)
    rounded(weight).float().square().sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, 2 * rounded(weight).detach().float(), rtol=0.01)


def test_a_sheet_is_read_as_it_was_saved(tmp_path: Path) -> None:
    pictures = torch.randint(0, 256, (5, SIDE, SIDE, 3), dtype=torch.uint8)
    save_sheet(pictures, tmp_path / "sheet.png", 3)
    assert torch.equal(read_sheet(tmp_path / "sheet.png", 5), pictures)
