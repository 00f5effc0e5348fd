"""The official row-wise fp8 kept as it is: the numbers of its bf16 form, in half the memory."""

from __future__ import annotations

import shutil
import types
from pathlib import Path

import comfy.lora
import comfy.model_management
import comfy.sd
import comfy.utils
import psutil
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from ideogram4_fusion.benchmarks.random_checkpoint import write_random_checkpoint
from ideogram4_fusion.hosts.comfyui.load import load_diffusion_model, settle_row_wise
from ideogram4_fusion.hosts.comfyui.quality import set_quality, status
from ideogram4_fusion.hosts.comfyui.row_wise import FORMAT, LAYOUT, RowWiseFP8Layout, keeps_fp8
from ideogram4_fusion.hosts.comfyui.sampling import find_preset, make_guider, preset_sigmas, sample
from ideogram4_fusion.tests.comfyui.models import ON_GPU, conditioning, empty_latent
from ideogram4_fusion.tests.tiny import (
    dequantise,
    quantise_row_wise,
    split_names,
    tiny_config,
    tiny_state_dict,
    write_file,
)

PRESET = find_preset("INSTANT_8")
LAYERS = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("row-wise") / "model.safetensors"
    if ON_GPU:
        return write_random_checkpoint(file, LAYERS, "fp8_row_wise")
    config = tiny_config(num_layers=LAYERS)
    return write_file(file, split_names(quantise_row_wise(tiny_state_dict(config))), config)


def render(model: ModelPatcher, batch: int = 1) -> torch.Tensor:
    latent = empty_latent(batch)
    levels = preset_sigmas(model, latent, PRESET)[-3:]
    guider = make_guider(model, conditioning(), PRESET, levels)
    return sample(guider, levels, latent, seed=3)["samples"]


def kept_linears(model: ModelPatcher) -> list[QuantizedTensor]:
    weights = (getattr(module, "weight", None) for module in model.model.diffusion_model.modules())
    return [weight for weight in weights if isinstance(weight, QuantizedTensor)]


@pytest.mark.parametrize("batch", [1, 2])
def test_kept_weights_give_the_picture_of_bf16_ones(inference: None, path: Path, batch: int) -> None:
    plain, kept = load_diffusion_model(path, "bf16"), load_diffusion_model(path, "fp8")
    render(plain)  # the very first forward of a process may differ
    assert torch.equal(render(kept, batch), render(plain, batch))
    linears = kept_linears(kept)
    assert len(linears) == LAYERS * 6 + 7 and not kept_linears(plain)
    assert {weight._layout_cls for weight in linears} == {LAYOUT}
    assert {weight._qdata.dtype for weight in linears} == {torch.float8_e4m3fn}
    if ON_GPU:  # the tiny one is norms and biases
        assert kept.model_size() < 0.6 * plain.model_size()


def test_lossless_equals_stock(inference: None, path: Path) -> None:
    kept = load_diffusion_model(path, "fp8")
    stock = render(kept)
    fused, _ = set_quality(kept, "lossless")
    for _ in range(2):
        assert torch.equal(render(fused), stock)
    assert ("silu-mul" in status(fused)) == ON_GPU and "fp8 input" not in status(fused)


def test_deep_copies_stay_as_they_were_loaded(path: Path) -> None:
    kept = load_diffusion_model(path, "fp8")
    copy = kept.clone(force_deepcopy=True)
    assert len(kept_linears(copy)) == len(kept_linears(kept))


@pytest.mark.skipif(ON_GPU, reason="compares with fp32 merging on the CPU")
def test_lora(path: Path) -> None:
    """A patched weight is quantised again, row by row, and goes back to what it was."""
    kept = load_diffusion_model(path, "fp8")
    before = kept.model.diffusion_model.layers[0].attention.qkv.weight.dequantize().clone()
    generator = torch.Generator().manual_seed(2)
    down, up = (torch.randn(*shape, generator=generator) * 0.05 for shape in ((4, 128), (384, 4)))
    name = "diffusion_model.layers.0.attention.qkv"
    lora = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    patched = kept.clone()
    assert (
        len(patched.add_patches(comfy.lora.load_lora(lora, comfy.lora.model_lora_keys_unet(kept.model, {})), 0.8)) == 1
    )
    comfy.model_management.load_models_gpu([patched])
    weight = patched.model.diffusion_model.layers[0].attention.qkv.weight
    merged = before.float() + 0.8 * up @ down
    # core rounds stochastically: up to a step of e4m3, 2^-3 of a value.
    assert weight._layout_cls == LAYOUT
    assert ((weight.dequantize().float() - merged).abs() <= merged.abs().amax(dim=1, keepdim=True) * 2**-3).all()
    assert not torch.equal(weight.dequantize(), before)
    patched.detach()
    assert torch.equal(kept.model.diffusion_model.layers[0].attention.qkv.weight.dequantize(), before)


@pytest.mark.parametrize("strength", [0.003, 0.01, 0.1])
def test_a_weak_lora_is_not_rounded_away(path: Path, strength: float) -> None:
    """Its standard deviation in shares of the weights'. Rounding to nearest kept 14 % of the weakest."""
    kept = load_diffusion_model(path, "fp8")
    linear = kept.model.diffusion_model.layers[0].attention.qkv
    before = linear.weight.dequantize().float()
    generator = torch.Generator().manual_seed(2)
    delta = torch.randn(before.shape, generator=generator).to(before.device) * before.std() * strength
    again = linear.weight.requantize_from_float(before + delta, scale="recalculate", stochastic_rounding=1234)
    change = again.dequantize().float() - before
    assert 0.85 < float((change * delta).sum() / (delta * delta).sum()) < 1.15


def test_a_saved_model_loads_again_and_is_no_format_of_cores(inference: None, path: Path, tmp_path: Path) -> None:
    kept = load_diffusion_model(path, "fp8")
    saved = tmp_path / "saved.safetensors"
    comfy.sd.save_checkpoint(str(saved), kept)
    for config in path.parent.glob("config.json"):
        shutil.copy(config, tmp_path)
    for choice in ("fp8", "bf16"):
        assert torch.equal(render(load_diffusion_model(saved, choice)), render(kept))
    marks = {
        bytes(tensor.tolist()).decode()
        for name, tensor in comfy.utils.load_torch_file(str(saved)).items()
        if name.endswith(".comfy_quant")
    }
    assert all(FORMAT in mark for mark in marks) and FORMAT not in QUANT_ALGOS


def test_auto_is_settled_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda device: 0)
    assert settle_row_wise(path, "auto") == "fp8"
    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda device: 1 << 50)
    assert settle_row_wise(path, "auto") == "bf16"


def test_fp32_norms_are_those_of_the_bf16_form(inference: None, tmp_path: Path) -> None:
    config = tiny_config(num_layers=1)
    weights = tiny_state_dict(config)
    stored = quantise_row_wise(weights)
    stored.update({name: tensor for name, tensor in weights.items() if "norm" in name})
    file = write_file(tmp_path / "m.safetensors", stored, config)
    plain, kept = (load_diffusion_model(file, choice).model.diffusion_model for choice in ("bf16", "fp8"))
    for name, tensor in plain.state_dict().items():
        if "norm" in name:
            assert torch.equal(kept.state_dict()[name], tensor), name


def test_dequantised_as_the_reference_does() -> None:
    weights = {"w.weight": torch.randn(32, 64, generator=torch.Generator().manual_seed(0))}
    stored = quantise_row_wise(weights)
    params = RowWiseFP8Layout.Params(
        scale=stored["w.weight_scale"], orig_dtype=torch.bfloat16, orig_shape=tuple(stored["w.weight"].shape)
    )
    ours = RowWiseFP8Layout.dequantize(stored["w.weight"], params)
    assert torch.equal(ours, dequantise(stored)["w.weight"].bfloat16())


@pytest.mark.parametrize(
    ("total", "free", "kept"), [(24, 64, False), (24, 10, True), (16, 64, True), (22, 20, False), (21, 64, True)]
)
def test_auto_takes_bf16_where_it_fits(total: int, free: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """18.6 GB of weights; memory of the device and free RAM in GB."""
    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda device: total * 10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=free * 10**9))
    assert keeps_fp8("auto", 9_279_288_448) == kept
    assert keeps_fp8("fp8", 9_279_288_448) and not keeps_fp8("bf16", 9_279_288_448)


def test_unknown_choice() -> None:
    with pytest.raises(ValueError, match="none of auto, bf16, fp8"):
        keeps_fp8("int4", 1)
