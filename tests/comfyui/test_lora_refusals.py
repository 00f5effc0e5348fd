"""LoRAs that cannot be put on the model: refused in words, with nothing of them applied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.lora
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from ideogram4_fusion.hosts.comfyui.load import load_diffusion_model
from ideogram4_fusion.hosts.comfyui.lora import LoraError, apply_lora
from ideogram4_fusion.tests.comfyui.loras import CONFIG, MODULE, RANK, lycoris, pairs, peft
from ideogram4_fusion.tests.tiny import StateDict, tiny_state_dict, write_file
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def weights() -> StateDict:
    return tiny_state_dict(CONFIG)


@pytest.fixture
def model(tmp_path: Path, weights: StateDict) -> ModelPatcher:
    return load_diffusion_model(write_file(tmp_path / "model.safetensors", weights, CONFIG))


def test_a_lora_of_another_model_is_refused(tmp_path: Path, model: ModelPatcher) -> None:
    file = tmp_path / "lora.safetensors"
    save_file({"transformer.blocks.0.attn.to_q.lora_A.weight": torch.zeros(4, 8)}, str(file))
    with pytest.raises(LoraError, match="none of its 1 tensors belongs to this model"):
        apply_lora(model, file, 1.0)


def test_a_lora_of_another_size_is_refused(tmp_path: Path, model: ModelPatcher, weights: StateDict) -> None:
    stored = peft("transformer.", pairs(weights, split=True))
    name = "transformer.layers.0.attention.to_k.lora_B.weight"
    stored[name] = torch.zeros(2 * stored[name].shape[0], RANK)
    file = tmp_path / "lora.safetensors"
    save_file(stored, str(file))
    with pytest.raises(LoraError, match=r"layers\.0\.attention\.qkv\.weight is \[256, 128\], the model's \[128, 128\]"):
        apply_lora(model, file, 1.0)


@pytest.mark.parametrize("spoil", ["half", "rank", "diff"])
def test_a_damaged_lora_is_refused(tmp_path: Path, model: ModelPatcher, weights: StateDict, spoil: str) -> None:
    stored = peft("transformer.", pairs(weights, split=True))
    name = "transformer.layers.0.attention.to_k"
    if spoil == "half":
        del stored[f"{name}.lora_A.weight"]
    elif spoil == "rank":
        stored[f"{name}.lora_A.weight"] = torch.zeros(RANK + 1, 128)
    else:
        stored = {f"{name}.diff": torch.zeros(64, 128)}
    file = tmp_path / "lora.safetensors"
    save_file(stored, str(file))
    with pytest.raises(LoraError):
        apply_lora(model, file, 1.0)


@pytest.mark.parametrize("spoil", ["size", "rank"])
@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_lycoris_of_another_size_is_refused(tmp_path: Path, model: ModelPatcher, kind: str, spoil: str) -> None:
    """core would log a line and leave the layer out."""
    stored, _ = lycoris(kind, 256 if spoil == "size" else 128)
    if spoil == "rank":
        name = f"transformer.{MODULE}.{'hada_w2_a' if kind == 'loha' else 'lokr_w2_a'}"
        stored[name] = torch.zeros(stored[name].shape[0], RANK + 1)
    file = tmp_path / "lycoris.safetensors"
    save_file(stored, str(file))
    said = r"\[256, 128\], the model's \[128, 128\]" if spoil == "size" else r"\[\], the model's \[128, 128\]"
    with pytest.raises(LoraError, match=said):
        apply_lora(model, file, 1.0)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "empty"), (b"<html>", "web page"), (None, "no numbers")],
    ids=["empty", "web page", "NaN"],
)
@pytest.mark.parametrize("ending", ["safetensors", "sft"])
def test_a_lora_that_is_none_is_refused_in_words(
    tmp_path: Path, model: ModelPatcher, weights: StateDict, content: bytes | None, words: str, ending: str
) -> None:
    file = tmp_path / f"lora.{ending}"
    if content is None:
        save_file({n: t * torch.nan for n, t in peft("", pairs(weights, split=True)).items()}, str(file))
    else:
        file.write_bytes(content)
    with pytest.raises(LoraError, match=rf"^lora\.{ending}: .*{words}"):
        apply_lora(model, file, 1.0)


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", {"a": "b"}, [torch.zeros(1)], {"state_dict": 3}, {1: torch.zeros(1)}],
    ids=["empty", "junk", "no tensors", "list", "a number for a dictionary", "numbers for names"],
)
def test_a_pickle_that_is_no_lora_is_refused_in_words(tmp_path: Path, model: ModelPatcher, content: Any) -> None:
    file = tmp_path / "lora.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(LoraError, match=r"^lora\.pt: it "):
        apply_lora(model, file, 1.0)


@pytest.mark.parametrize("spoil", ["pattern", "alpha", "rank"])
def test_settings_that_say_nothing_sensible_are_damage(
    tmp_path: Path, model: ModelPatcher, weights: StateDict, spoil: str
) -> None:
    stored = peft("transformer.", pairs(weights, split=True))
    settings = {"transformer.lora_alpha": 4, "transformer.alpha_pattern": {"(" if spoil == "pattern" else ".*": None}}
    if spoil == "rank":
        settings["transformer.alpha_pattern"] = {}
        stored = {name: t[:0] if ".lora_A." in name else t[:, :0] for name, t in stored.items()}
    file = tmp_path / "lora.safetensors"
    save_file(stored, str(file), {"lora_adapter_metadata": json.dumps(settings)})
    with pytest.raises(LoraError, match="damaged"):
        apply_lora(model, file, 1.0)


def test_a_file_that_is_not_there_is_not_called_damaged(tmp_path: Path, model: ModelPatcher) -> None:
    with pytest.raises(LoraError, match=r"^lora\.pt: it cannot be read \("):
        apply_lora(model, tmp_path / "lora.pt", 1.0)


def test_too_little_memory_is_not_called_damage(
    tmp_path: Path, model: ModelPatcher, weights: StateDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError

    file = tmp_path / "lora.safetensors"
    save_file(peft("transformer.", pairs(weights, split=True)), str(file))
    monkeypatch.setattr(comfy.lora, "load_lora", full)
    with pytest.raises(torch.OutOfMemoryError):
        apply_lora(model, file, 1.0)
