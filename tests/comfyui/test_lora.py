"""LoRAs under every trainer's names, against weights with the same product merged in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.model_management
import comfy.utils
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from ideogram4_fusion.hosts.comfyui.load import load_diffusion_model
from ideogram4_fusion.hosts.comfyui.lora import apply_lora, lora_names
from ideogram4_fusion.hosts.comfyui.quality import set_quality
from ideogram4_fusion.tests.comfyui.loras import CONFIG, RANK, STRENGTH, lycoris, pairs, peft
from ideogram4_fusion.tests.tiny import StateDict, tiny_state_dict, write_file
from safetensors.torch import save_file

# core merges into bf16 on a GPU, or only as it multiplies.
merged_in_fp32 = pytest.mark.skipif(torch.cuda.is_available(), reason="merged weights are compared in fp32, on the CPU")


@pytest.fixture(scope="module")
def weights() -> StateDict:
    return tiny_state_dict(CONFIG)


@pytest.fixture
def model(tmp_path: Path, weights: StateDict) -> ModelPatcher:
    return load_diffusion_model(write_file(tmp_path / "model.safetensors", weights, CONFIG))


def merged(weights: StateDict, changes: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> StateDict:
    """The weights with strength * up @ down added, by plain slices."""
    result = {name: tensor.clone() for name, tensor in weights.items()}
    for module, (down, up) in changes.items():
        delta = STRENGTH * up @ down
        block, _, part = module.rpartition(".to_")
        if part in ("q", "k", "v"):
            qkv = result[f"{block}.qkv.weight"]
            start = "qkv".index(part) * (qkv.shape[0] // 3)
            qkv[start : start + delta.shape[0]] += delta
        else:
            result[f"{module.replace('to_out.0', 'o')}.weight"] += delta
    return result


def kohya(changes: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> StateDict:
    """With an alpha of twice the rank, so that the product counts twice."""
    stored: StateDict = {}
    for module, (down, up) in changes.items():
        name = f"lora_unet_{module.replace('.', '_')}"
        stored |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up / 2}
        stored[f"{name}.alpha"] = torch.tensor(2.0 * RANK)
    return stored


NAMINGS = {
    "diffusers": (True, lambda changes: peft("transformer.", changes)),
    "diffusers without a prefix": (True, lambda changes: peft("", changes)),
    "ai-toolkit": (False, lambda changes: peft("diffusion_model.", changes)),
    "original": (False, lambda changes: peft("conditional_transformer.", changes)),
    "kohya": (False, kohya),
    "kohya, split": (True, kohya),
}


@merged_in_fp32
@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_gives_the_merged_weights(
    tmp_path: Path, model: ModelPatcher, weights: StateDict, naming: str
) -> None:
    split, spelled = NAMINGS[naming]
    changes = pairs(weights, split)
    file = tmp_path / "lora.safetensors"
    save_file(spelled(changes), str(file))
    patched, line = apply_lora(model, file, STRENGTH)
    assert line == f"{len(changes)} layers at strength 0.8"
    comfy.model_management.load_models_gpu([patched])
    loaded = patched.model.diffusion_model.state_dict()
    try:
        for name, expected in merged(weights, changes).items():
            torch.testing.assert_close(loaded[name].float(), expected, rtol=0, atol=1e-6)
    finally:
        patched.detach()
    for name, tensor in weights.items():
        assert torch.equal(model.model.diffusion_model.state_dict()[name].float(), tensor), name


def test_what_matches_nothing_is_counted_and_named(tmp_path: Path, model: ModelPatcher, weights: StateDict) -> None:
    changes = pairs(weights, split=True)
    stored = peft("transformer.", changes)
    strangers = [f"text_encoder.layers.{n}.q_proj.lora_A.weight" for n in range(5)]
    stored |= {name: torch.zeros(1) for name in strangers}
    file = tmp_path / "lora.safetensors"
    save_file(stored, str(file))
    _, line = apply_lora(model, file, 1.0)
    assert line.startswith(f"{len(changes)} layers at strength 1; 5 of {len(stored)} tensors match nothing: ")
    assert line.endswith(" and 2 more") and strangers[0] in line


@merged_in_fp32
def test_a_bias_that_the_model_lacks_is_counted_and_left(
    tmp_path: Path, model: ModelPatcher, weights: StateDict
) -> None:
    changes = {name: both for name, both in pairs(weights, split=True).items() if name.startswith("layers.0.")}
    stored = peft("transformer.", changes)
    lost = [f"transformer.layers.0.{part}.diff_b" for part in ("attention.to_q", "feed_forward.w1")]
    stored |= {name: torch.zeros(128) for name in lost}
    stored["transformer.layers.0.adaln_modulation.diff_b"] = torch.ones(4 * 128)
    stored["transformer.layers.0.attention.to_q.lora_magnitude_vector"] = torch.ones(128)
    file = tmp_path / "lora.safetensors"
    save_file(stored, str(file))
    patched, line = apply_lora(model, file, 1.0)
    assert line.startswith(f"{len(changes) + 1} layers at strength 1; 3 of {len(stored)} tensors match nothing")
    comfy.model_management.load_models_gpu([patched])
    bias = patched.model.diffusion_model.layers[0].adaln_modulation.bias.float().clone()
    patched.detach()
    torch.testing.assert_close(bias, weights["layers.0.adaln_modulation.bias"] + 1)


@merged_in_fp32
def test_alpha_of_the_metadata_counts(tmp_path: Path, model: ModelPatcher, weights: StateDict) -> None:
    """diffusers writes it there, and no tensor says it."""
    changes = pairs(weights, split=True)
    file = tmp_path / "lora.safetensors"
    settings = {"transformer.r": RANK, "transformer.lora_alpha": 2 * RANK}
    save_file(peft("transformer.", changes), str(file), {"lora_adapter_metadata": json.dumps(settings)})
    patched, line = apply_lora(model, file, STRENGTH / 2)
    assert line == f"{len(changes)} layers at strength 0.4 x 2 of its alpha"
    comfy.model_management.load_models_gpu([patched])
    loaded = patched.model.diffusion_model.layers[1].attention.qkv.weight.float().clone()
    patched.detach()
    torch.testing.assert_close(loaded, merged(weights, changes)["layers.1.attention.qkv.weight"], rtol=0, atol=1e-6)


def test_strength_0_is_the_model_itself(tmp_path: Path, model: ModelPatcher, weights: StateDict) -> None:
    file = tmp_path / "lora.safetensors"
    save_file(peft("transformer.", pairs(weights, split=True)), str(file))
    same, line = apply_lora(model, file, 0.0)
    assert same is model and line.endswith("at strength 0: not applied")


def test_a_quality_goes_on_holding(tmp_path: Path, model: ModelPatcher, weights: StateDict) -> None:
    from ideogram4_fusion.hosts.comfyui.quality import fusion_of

    file = tmp_path / "lora.safetensors"
    save_file(peft("transformer.", pairs(weights, split=True)), str(file))
    fused, _ = set_quality(model, "lossless")
    patched, _ = apply_lora(fused, file, 1.0)
    assert fusion_of(patched) is fusion_of(fused)


@merged_in_fp32
@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_lycoris_on_a_third_of_qkv(tmp_path: Path, model: ModelPatcher, weights: StateDict, kind: str) -> None:
    stored, delta = lycoris(kind)
    file = tmp_path / "lycoris.safetensors"
    save_file(stored, str(file))
    patched, line = apply_lora(model, file, STRENGTH)
    assert line == "1 layers at strength 0.8"
    comfy.model_management.load_models_gpu([patched])
    loaded = patched.model.diffusion_model.layers[1].attention.qkv.weight.float().clone()
    patched.detach()
    expected = weights["layers.1.attention.qkv.weight"].clone()
    expected[128:256] += STRENGTH * delta
    torch.testing.assert_close(loaded, expected, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("exact_on_the_cpu", "inference")
@pytest.mark.parametrize("strength", [0.8, 0.0])
@pytest.mark.parametrize("through", ["the node", "core"])
def test_fused_is_stock_with_a_lora_at_any_weight(tmp_path: Path, path: Path, through: str, strength: float) -> None:
    """To the bit, on q, k and v apart; core keeps patches of weight 0, the node does not."""
    from ideogram4_fusion.hosts.comfyui.quality import status
    from ideogram4_fusion.tests.comfyui.models import ON_GPU, load
    from ideogram4_fusion.tests.comfyui.renders import render

    model = load(path)
    blocks = model.model.diffusion_model.layers
    file = tmp_path / "lora.safetensors"
    save_file(peft("transformer.", pairs(model.model.diffusion_model.state_dict(), split=True)), str(file))
    if through == "the node":
        patched, _ = apply_lora(model, file, strength)
    else:
        patched = model.clone()
        patched.add_patches(comfy.lora.load_lora(comfy.utils.load_torch_file(str(file)), lora_names(model)), strength)
    stock = render(patched)
    fused, _ = set_quality(patched, "lossless")
    assert torch.equal(render(fused), stock)
    mounted = f"lossless: {len(blocks)}/{len(blocks)} blocks; modulate, gate, gate+modulate, silu-mul"
    assert status(fused).startswith(mounted)
    # A patched fp8 weight, as on a GPU, is rounded anew at any strength.
    if through == "the node" or not ON_GPU:
        assert torch.equal(stock, render(model)) == (strength == 0)


@pytest.mark.parametrize(
    ("more", "said", "scales"),
    [
        ({}, "2", (2.0, 2.0)),
        ({"use_rslora": True}, "4", (4.0, 4.0)),
        ({"alpha_pattern": {"feed_forward.w1": 1}}, "0.25 or 2", (0.25, 2.0)),
    ],
    ids=["alpha / rank", "alpha / sqrt(rank)", "an alpha of its own"],
)
def test_the_metadata_s_alpha_is_applied_as_peft_does(
    tmp_path: Path,
    model: ModelPatcher,
    weights: StateDict,
    more: dict[str, Any],
    said: str,
    scales: tuple[float, float],
) -> None:
    changes = pairs(weights, split=False)
    file = tmp_path / "lora.safetensors"
    settings = {f"transformer.{name}": value for name, value in {"r": RANK, "lora_alpha": 2 * RANK, **more}.items()}
    save_file(peft("transformer.", changes), str(file), {"lora_adapter_metadata": json.dumps(settings)})
    patched, line = apply_lora(model, file, 1.0)
    assert line.endswith(f" x {said} of its alpha")
    for part, scale in zip(("feed_forward.w1", "feed_forward.w2"), scales, strict=True):
        name = f"diffusion_model.layers.0.{part}.weight"
        down, up = changes[f"layers.0.{part}"]
        zeros = torch.zeros(up.shape[0], down.shape[1])
        merged_in = comfy.lora.calculate_weight(patched.patches[name], zeros, name, intermediate_dtype=torch.float32)
        torch.testing.assert_close(merged_in, scale * up @ down, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_lora_stored_in_fp8_is_taken(
    tmp_path: Path, model: ModelPatcher, weights: StateDict, dtype: torch.dtype
) -> None:
    file = tmp_path / "lora.safetensors"
    save_file({name: t.to(dtype) for name, t in peft("transformer.", pairs(weights, split=True)).items()}, str(file))
    _, line = apply_lora(model, file, STRENGTH)
    assert line.endswith("layers at strength 0.8")


def test_what_a_pickle_holds_beside_tensors_is_left_alone(
    tmp_path: Path, model: ModelPatcher, weights: StateDict
) -> None:
    file = tmp_path / "lora.pt"
    stored: dict[Any, Any] = {**peft("transformer.", pairs(weights, split=True)), "epoch": 3, 7: torch.zeros(1)}
    torch.save(stored, file)
    _, line = apply_lora(model, file, STRENGTH)
    assert line.endswith("layers at strength 0.8")
