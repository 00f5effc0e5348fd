"""Every layout through the loader, against core's own transformer class with weights dequantised by the test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.ldm.ideogram4.model
import comfy.lora
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.supported_models
import comfy.utils
import pytest
import torch
from ideogram4_fusion.checkpoint.errors import CheckpointError
from ideogram4_fusion.hosts.comfyui.load import describe_file, load_diffusion_model
from ideogram4_fusion.tests.exact import as_legacy
from ideogram4_fusion.tests.tiny import (
    StateDict,
    dequantise,
    quantise_row_wise,
    quantise_scaled,
    split_names,
    tiny_config,
    tiny_state_dict,
    write_file,
)

CONFIG = tiny_config()
QKV = "layers.0.attention.qkv.weight"

# fp32 has a unit roundoff of 6e-8; a value passes some 30 operations on its way through two layers.
TOLERANCE = 30 * 6e-8


def cast(dtype: torch.dtype) -> Callable[[StateDict], StateDict]:
    return lambda weights: {name: tensor.to(dtype) for name, tensor in weights.items()}


def legacy_scaled(weights: StateDict) -> StateDict:
    return as_legacy(quantise_scaled(weights))


# Layout -> what the file holds, and the dtype in which its scales meet its weights.
LAYOUTS: dict[str, tuple[Callable[[StateDict], StateDict], torch.dtype]] = {
    "fp32": (cast(torch.float32), torch.float32),
    "bf16": (cast(torch.bfloat16), torch.float32),
    "bf16 split": (lambda weights: split_names(cast(torch.bfloat16)(weights)), torch.float32),
    "fp16": (cast(torch.float16), torch.float32),
    "fp16 split": (lambda weights: split_names(cast(torch.float16)(weights)), torch.float32),
    "row-wise": (quantise_row_wise, torch.bfloat16),
    "row-wise split": (lambda weights: split_names(quantise_row_wise(weights)), torch.bfloat16),
    "scaled": (quantise_scaled, torch.float32),
}


@pytest.fixture
def weights() -> StateDict:
    return tiny_state_dict(CONFIG)


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.inference_mode():
        yield


def inputs(text: int | None = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Latent [2, 128, 4, 6], sigma [2], text features [2, text, 104] or None for the image-only pass."""
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(2, CONFIG["in_channels"], 4, 6, generator=generator)
    features = None if text is None else torch.randn(2, text, CONFIG["llm_features_dim"], generator=generator)
    return latent, torch.tensor([0.9, 0.3]), features


def reference(weights: StateDict) -> torch.nn.Module:
    """core's transformer in fp32 with plain fused weights, loaded strictly."""
    config = {name: value for name, value in CONFIG.items() if not name.startswith("_")}
    model = comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel(
        **config, dtype=torch.float32, operations=comfy.ops.disable_weight_init
    )
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True)
    return model.eval()


def fused_values(weights: StateDict, layout: str) -> StateDict:
    """What the file of a layout stands for, fused and fp32, found without the code under test."""
    store, scale_dtype = LAYOUTS[layout.removesuffix(" split")]
    return dequantise(store(weights), scale_dtype)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def file_of(folder: Path, weights: StateDict, layout: str) -> Path:
    return write_file(folder / "model.safetensors", LAYOUTS[layout][0](weights), CONFIG, {"format": "pt"})


@pytest.mark.parametrize("text", [5, None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_is_that_of_the_dequantised_weights(
    tmp_path: Path, weights: StateDict, layout: str, text: int | None
) -> None:
    patcher = load_diffusion_model(file_of(tmp_path, weights, layout))
    expected = reference(fused_values(weights, layout))(*inputs(text))
    assert distance(patcher.model.diffusion_model(*inputs(text)), expected) < TOLERANCE


@pytest.mark.parametrize("row_wise", ["bf16", "fp8"])
@pytest.mark.parametrize("layout", ["bf16 split", "row-wise", "scaled"])
def test_a_wish_for_an_attention_is_no_damage(tmp_path: Path, weights: StateDict, layout: str, row_wise: str) -> None:
    """Written as newer cores read it; what 0.33 does not know it leaves out."""
    wish = torch.tensor(list(b'[{"attention": "unheard of"}]'), dtype=torch.uint8)
    stored = {**LAYOUTS[layout][0](weights), "layers.1.attention.comfy_attention.config": wish.clone()}
    file = write_file(tmp_path / "model.safetensors", stored, CONFIG, {"format": "pt"})
    wished = load_diffusion_model(file, row_wise).model.diffusion_model(*inputs())
    plain = load_diffusion_model(file_of(tmp_path, weights, layout), row_wise).model.diffusion_model(*inputs())
    assert torch.equal(wished, plain)
    unknown = {**stored, "layers.1.attention.comfy_attention.other": wish.clone()}
    with pytest.raises(CheckpointError, match=r"unknown: layers\.1\.attention\.comfy_attention\.other"):
        load_diffusion_model(write_file(file, unknown, CONFIG, {"format": "pt"}), row_wise)


def test_quantisation_and_config_are_visible_in_the_output(weights: StateDict) -> None:
    """The test above would notice a dropped scale's rounding, a swapped q and k, an official norm_eps."""
    exact = reference(weights)(*inputs())
    for layout in ("bf16", "fp16", "row-wise", "scaled"):
        assert distance(reference(fused_values(weights, layout))(*inputs()), exact) > 20 * TOLERANCE
    swapped = {**weights, QKV: weights[QKV].roll(128, 0)}
    assert distance(reference(swapped)(*inputs()), exact) > 20 * TOLERANCE
    official = reference(weights)
    for name, module in official.named_modules():
        if name.endswith(("_norm1", "_norm2")):
            module.eps = 1e-5
    assert distance(official(*inputs()), exact) > 20 * TOLERANCE


@pytest.mark.parametrize("layout", ["row-wise", "bf16 split"])
def test_output_is_diffusers(tmp_path: Path, weights: StateDict, layout: str) -> None:
    """Another implementation of the model: -core(sigma) = diffusers(1 - sigma), tokens [text | image]."""
    models = pytest.importorskip("diffusers.models.transformers.transformer_ideogram4")
    config = {name: value for name, value in CONFIG.items() if not name.startswith("_")}
    model = models.Ideogram4Transformer2DModel(**config)
    model.load_state_dict(split_names(fused_values(weights, layout)), strict=True)

    core = load_diffusion_model(file_of(tmp_path, weights, layout)).model.diffusion_model
    latent, sigma, features = inputs()
    assert features is not None
    batch, text, _ = features.shape
    image = core._img_to_tokens(latent)
    positions = torch.cat([torch.arange(text)[:, None].expand(text, 3), core._image_position_ids(4, 6, "cpu")])
    length = len(positions)
    is_text = torch.arange(length) < text
    output = model(
        hidden_states=torch.cat([image.new_zeros(batch, text, image.shape[-1]), image], 1),
        timestep=1 - sigma,
        encoder_hidden_states=torch.nn.functional.pad(features, (0, 0, 0, image.shape[1])),
        position_ids=positions.expand(batch, length, 3),
        segment_ids=torch.ones(batch, length, dtype=torch.long),
        indicator=torch.where(is_text, 3, 2).expand(batch, length),
    ).sample
    assert distance(core(latent, sigma, features), -core._tokens_to_img(output[:, text:], 4, 6)) < TOLERANCE


@pytest.mark.parametrize("store", [quantise_scaled, legacy_scaled])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_per_tensor_fp8_is_bit_equal_to_core(
    tmp_path: Path,
    weights: StateDict,
    store: Callable[[StateDict], StateDict],
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = write_file(tmp_path / "m.safetensors", {prefix + k: v for k, v in store(weights).items()}, CONFIG)
    ours = load_diffusion_model(file).model.diffusion_model
    # core's own loader has the official sizes written into its class; for once they are the tiny ones.
    monkeypatch.setattr(comfy.supported_models.Ideogram4, "unet_extra_config", CONFIG)
    core = comfy.sd.load_diffusion_model(str(file)).model.diffusion_model
    weight = ours.layers[0].attention.qkv.weight
    assert weight.state_dict("w")["w"].dtype == torch.float8_e4m3fn
    assert torch.equal(ours(*inputs()), core(*inputs()))


def test_per_tensor_fp8_marked_in_the_metadata(tmp_path: Path, weights: StateDict) -> None:
    prefix = "model.diffusion_model."
    tensors = quantise_scaled(weights)
    layers = {prefix + name.removesuffix(".comfy_quant") for name in tensors if name.endswith(".comfy_quant")}
    marks = {"layers": {name: {"format": "float8_e4m3fn"} for name in layers}}
    stored = {prefix + name: t for name, t in tensors.items() if not name.endswith(".comfy_quant")}
    file = write_file(tmp_path / "m.safetensors", stored, CONFIG, {"_quantization_metadata": json.dumps(marks)})
    expected = reference(fused_values(weights, "scaled"))(*inputs())
    assert distance(load_diffusion_model(file).model.diffusion_model(*inputs()), expected) < TOLERANCE


def test_shards_are_one_model(tmp_path: Path, weights: StateDict) -> None:
    split = split_names(weights)
    names = sorted(split)  # q, k and v of layer 0 land in different files
    half = names.index("layers.0.attention.to_q.weight")
    files = [
        write_file(tmp_path / f"m-0000{i}-of-00002.safetensors", {name: split[name] for name in part}, CONFIG)
        for i, part in enumerate((names[:half], names[half:]), 1)
    ]
    for file in files:
        output = load_diffusion_model(file).model.diffusion_model(*inputs())
        assert distance(output, reference(weights)(*inputs())) < TOLERANCE


def test_row_wise_weights_are_taken_over_in_bf16(
    tmp_path: Path, weights: StateDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bf16 compute, as on a GPU, the parameters are the dequantised tensors themselves: no second copy in RAM."""
    monkeypatch.setattr(comfy.model_management.args, "bf16_unet", True)
    addresses: dict[str, int] = {}
    original = comfy.model_base.BaseModel.load_model_weights

    def recording(self: Any, state_dict: StateDict, *args: Any, **kwargs: Any) -> Any:
        addresses.update({name: tensor.data_ptr() for name, tensor in state_dict.items()})
        return original(self, state_dict, *args, **kwargs)

    monkeypatch.setattr(comfy.model_base.BaseModel, "load_model_weights", recording)
    stored = quantise_row_wise(weights)
    stored["llm_cond_norm.weight"] = weights["llm_cond_norm.weight"]  # an fp32 norm among fp8
    file = write_file(tmp_path / "m.safetensors", split_names(stored), CONFIG)
    loaded = load_diffusion_model(file).model.diffusion_model.state_dict()
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    for name, expected in dequantise(stored).items():
        assert torch.equal(loaded[name], expected.to(torch.bfloat16)), name
        assert loaded[name].data_ptr() == addresses[name], name


@pytest.mark.parametrize("layout", ["row-wise split", "scaled", "bf16"])
def test_deep_copies_load_the_file_again(tmp_path: Path, weights: StateDict, layout: str) -> None:
    patcher = load_diffusion_model(str(file_of(tmp_path, weights, layout)))
    expected = patcher.model.diffusion_model(*inputs())
    for copy in (patcher.clone(force_deepcopy=True), patcher.deepclone_multigpu(torch.device("cpu"))):
        assert copy.model is not patcher.model
        assert torch.equal(copy.model.diffusion_model(*inputs()), expected)
        assert copy.cached_patcher_init == patcher.cached_patcher_init


class DynamicPatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """Stands for ModelPatcherDynamic, which turns into a plain patcher on the CPU."""

    def is_dynamic(self) -> bool:
        return True


@pytest.mark.parametrize("layout", ["row-wise split", "scaled", "fp16"])
def test_dynamic_patcher_and_its_plain_delegate(
    tmp_path: Path, weights: StateDict, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As main.py does when it turns dynamic VRAM on.
    monkeypatch.setattr(comfy.model_patcher, "CoreModelPatcher", DynamicPatcher)
    patcher = load_diffusion_model(file_of(tmp_path, weights, layout))
    assert isinstance(patcher, DynamicPatcher)
    # Under dynamic VRAM the file's own dtype stays and every use casts.
    stored = {"row-wise split": torch.bfloat16, "fp16": torch.float16}
    if layout in stored:
        assert patcher.model.diffusion_model.layers[0].attention.qkv.weight.dtype == stored[layout]
    plain = patcher.clone(disable_dynamic=True)
    assert type(plain) is comfy.model_patcher.ModelPatcher
    expected = reference(fused_values(weights, layout))(*inputs())
    assert distance(plain.model.diffusion_model(*inputs()), expected) < TOLERANCE


@pytest.mark.parametrize("layout", ["row-wise split", "bf16"])
def test_lora_on_qkv(tmp_path: Path, weights: StateDict, layout: str) -> None:
    """A LoRA under core's own names, applied by core, equals the weights with it merged in."""
    patcher = load_diffusion_model(file_of(tmp_path, weights, layout))
    generator = torch.Generator().manual_seed(2)
    down, up = (torch.randn(*shape, generator=generator) * 0.05 for shape in ((4, 128), (384, 4)))
    module = f"diffusion_model.{QKV.removesuffix('.weight')}"
    lora = {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    patches = comfy.lora.load_lora(lora, comfy.lora.model_lora_keys_unet(patcher.model, {}))
    assert list(patches) == [f"diffusion_model.{QKV}"]
    patched = patcher.clone()
    assert len(patched.add_patches(patches, 0.8)) == 1

    values = fused_values(weights, layout)
    comfy.model_management.load_models_gpu([patched])
    merged = reference({**values, QKV: values[QKV] + 0.8 * up @ down})(*inputs())
    assert distance(patched.model.diffusion_model(*inputs()), merged) < TOLERANCE
    patched.detach()
    assert distance(patcher.model.diffusion_model(*inputs()), reference(values)(*inputs())) < TOLERANCE
    assert distance(merged, reference(values)(*inputs())) > 1e-3


def test_bad_files_never_reach_core(tmp_path: Path, weights: StateDict, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("tensors were read")

    monkeypatch.setattr(comfy.utils, "load_torch_file", read)
    incomplete = {name: tensor for name, tensor in weights.items() if name != QKV}
    file = write_file(tmp_path / "m.safetensors", incomplete, CONFIG)
    for call in (load_diffusion_model, describe_file):
        with pytest.raises(CheckpointError, match=QKV):
            call(file)
    other_ending = write_file(tmp_path / "m.bin", weights, CONFIG)
    with pytest.raises(CheckpointError, match="another ending"):
        load_diffusion_model(other_ending)


def test_a_transformer_that_core_has_changed_is_refused(
    tmp_path: Path, weights: StateDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """core only logs missing and unexpected weights; here a newer core's block has one more, one fewer."""
    block = comfy.ldm.ideogram4.model.Ideogram4TransformerBlock
    original = block.__init__

    def with_more(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.extra = torch.nn.Parameter(torch.zeros(1))

    def with_fewer(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        del self.ffn_norm2

    file = file_of(tmp_path, weights, "bf16")
    monkeypatch.setattr(block, "__init__", with_more)
    with pytest.raises(CheckpointError, match=r"weights that the file lacks \(tensor layers\.0\.extra\)"):
        load_diffusion_model(file)
    monkeypatch.setattr(block, "__init__", with_fewer)
    with pytest.raises(CheckpointError, match=r"no place for .* \(tensor layers\.0\.ffn_norm2\.weight\)"):
        load_diffusion_model(file)


def test_description(tmp_path: Path, weights: StateDict) -> None:
    file = file_of(tmp_path, weights, "row-wise")
    said = "official row-wise fp8, fused qkv, 2 layers x 128"
    assert describe_file(file) == f"{said}, as bf16"
    assert describe_file(file, "fp8") == f"{said}, kept as fp8"
