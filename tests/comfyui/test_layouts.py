"""The README's table of layouts, a test for each row: one small model written in all of them gives one output.

Its weights are numbers that every layout can hold, so that the outputs are equal to the bit where nothing but the
layout differs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import comfy.cli_args
import comfy.model_patcher
import comfy.sd
import comfy.supported_models
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from ideogram4_fusion.checkpoint.errors import CheckpointError
from ideogram4_fusion.checkpoint.layout import PREFIXES
from ideogram4_fusion.hosts.comfyui.folder import load_folder
from ideogram4_fusion.hosts.comfyui.load import describe_file, load_diffusion_model
from ideogram4_fusion.hosts.comfyui.quality import set_quality, status
from ideogram4_fusion.hosts.comfyui.sampling import make_guider, preset_sigmas, sample
from ideogram4_fusion.tests.comfyui.other_pack import PackedOps, packed
from ideogram4_fusion.tests.comfyui.renders import PRESET
from ideogram4_fusion.tests.comfyui.workflow_files import ROOT
from ideogram4_fusion.tests.exact import exact_state_dict, fp8_scaled, grid_unit, legacy_scaled, mark, row_wise
from ideogram4_fusion.tests.tiny import StateDict, is_linear_weight, split_names, tiny_config, write_file

CONFIG = tiny_config(llm_features_dim=13 * 32, norm_eps=1e-5)
FILE = "model.safetensors"
Write = Callable[[Path, StateDict], Path]


@pytest.fixture(scope="module")
def weights() -> StateDict:
    return exact_state_dict(CONFIG)


@pytest.fixture(scope="module")
def expected(weights: StateDict, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Of the plain fp32 file, which test_load.py holds against core's class and against diffusers."""
    with torch.inference_mode():
        return output(write_file(tmp_path_factory.mktemp("fp32") / FILE, weights, CONFIG))


def output(file: Path, choice: str = "bf16") -> torch.Tensor:
    """Text and image, in fp32."""
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(2, CONFIG["in_channels"], 4, 6, generator=generator)
    features = torch.randn(2, 5, CONFIG["llm_features_dim"], generator=generator)
    model = load_diffusion_model(file, choice).model.diffusion_model
    result: torch.Tensor = model(latent, torch.tensor([0.9, 0.3]), features)
    return result


def stored(store: Callable[[StateDict], StateDict]) -> Write:
    return lambda folder, weights: write_file(folder / FILE, store(dict(weights)), CONFIG)


def cast(dtype: torch.dtype) -> Callable[[StateDict], StateDict]:
    return lambda weights: {name: tensor.to(dtype) for name, tensor in weights.items()}


def split(store: Callable[[StateDict], StateDict]) -> Callable[[StateDict], StateDict]:
    return lambda weights: split_names(store(weights))


def prefixed(prefix: str) -> Callable[[StateDict], StateDict]:
    return lambda weights: {prefix + name: tensor for name, tensor in row_wise(weights).items()}


def marked_in_metadata(folder: Path, weights: StateDict) -> Path:
    tensors = {name: t for name, t in fp8_scaled(weights).items() if not name.endswith(".comfy_quant")}
    modules = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    layers = {"layers": {module: {"format": "float8_e4m3fn"} for module in modules}}
    return write_file(folder / FILE, tensors, CONFIG, {"_quantization_metadata": json.dumps(layers)})


def nvfp4_mixed(weights: StateDict) -> StateDict:
    """The large Linears of the blocks in four bits, the rest per-tensor fp8, as in Comfy-Org's file."""
    tensors = fp8_scaled(weights)
    for name, tensor in weights.items():
        if is_linear_weight(name, tensor) and (".attention." in name or ".feed_forward." in name):
            unit = torch.tensor(grid_unit(tensor))
            quantised = QuantizedTensor.from_float(tensor.bfloat16(), "TensorCoreNVFP4Layout", scale=unit)
            assert torch.equal(quantised.dequantize().float(), tensor), "the layout does not hold these numbers"
            tensors |= {key: part.contiguous() for key, part in quantised.state_dict(name).items()}
            tensors[f"{name.removesuffix('weight')}comfy_quant"] = mark(format="nvfp4")
    return tensors


def int8_convrot(weights: StateDict) -> StateDict:
    """All Linears of the blocks rotated in eight bits: the rotation's numbers are not the reference's."""
    tensors = {name: tensor.bfloat16() for name, tensor in weights.items()}
    options = {"is_weight": True, "per_channel": True, "convrot": True, "convrot_groupsize": 16}
    for name, tensor in weights.items():
        if is_linear_weight(name, tensor) and name.startswith("layers."):
            quantised = QuantizedTensor.from_float(tensor.bfloat16(), "TensorWiseINT8Layout", **options)
            del tensors[name]
            tensors |= {key: part.contiguous() for key, part in quantised.state_dict(name).items()}
            tensors[f"{name.removesuffix('weight')}comfy_quant"] = mark(
                format="int8_tensorwise", convrot=True, convrot_groupsize=16
            )
    return tensors


def sharded(folder: Path, weights: StateDict) -> Path:
    """Two files of any name and an index; q, k and v of a layer are not in one of them."""
    names = sorted(tensors := split_names(row_wise(weights)))
    files = {name: f"part-{'one' if i % 2 else 'two'}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        write_file(folder / file, {name: tensors[name] for name in names if files[name] == file}, CONFIG)
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (folder / f"{FILE}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder / "part-one.safetensors"


# A row of the table -> the files that it speaks of, and what the loader says of each.
EXACT: dict[str, dict[Write, str]] = {
    "official fp8": {
        stored(row_wise): "official row-wise fp8, fused qkv",
        stored(split(row_wise)): "official row-wise fp8, split q, k, v",
    },
    "fp8_scaled": {stored(fp8_scaled): "ComfyUI per-tensor fp8, fused qkv", marked_in_metadata: "ComfyUI per-tensor"},
    "scaled_fp8": {stored(legacy_scaled): "ComfyUI per-tensor fp8, fused qkv"},
    "nvfp4_mixed": {stored(nvfp4_mixed): "ComfyUI nvfp4 and fp8, fused qkv"},
    "bf16, fp16, fp32": {
        **{
            stored(cast(dtype)): f"{word} weights, fused qkv"
            for dtype, word in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32"))
        },
        **{
            stored(split(cast(dtype))): f"{word} weights, split q, k, v"
            for dtype, word in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32"))
        },
    },
    "prefixes": {stored(prefixed(prefix)): "official row-wise fp8" for prefix in PREFIXES},
    "shards": {sharded: "official row-wise fp8, split q, k, v"},
}
ROWS = {*EXACT, "int8_convrot", "folder", "nf4", "GGUF"}


def test_each_row_of_the_table_is_tested() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.search(r"\| layout \| .*\n\|[-| ]+\n((?:\|.*\n)+)", text)
    assert table is not None
    rows = [line.split("|")[1].partition(" (")[0].strip("` ") for line in table[1].splitlines()]
    assert sorted(rows) == sorted(ROWS)


@pytest.mark.parametrize(("row", "number"), [(row, n) for row, files in EXACT.items() for n in range(len(files))])
def test_one_model_in_every_layout_gives_one_output(
    inference: None, tmp_path: Path, weights: StateDict, expected: torch.Tensor, row: str, number: int
) -> None:
    write, said = list(EXACT[row].items())[number]
    file = write(tmp_path, weights)
    assert describe_file(file).startswith(said)
    for choice in ("bf16", "fp8"):
        assert torch.equal(output(file, choice), expected), choice


def test_a_swapped_third_or_scale_would_show(
    inference: None, tmp_path: Path, weights: StateDict, expected: torch.Tensor
) -> None:
    tensors = row_wise(weights)
    tensors["layers.1.attention.qkv.weight_scale"] = tensors["layers.1.attention.qkv.weight_scale"].roll(1)
    assert not torch.equal(output(write_file(tmp_path / FILE, tensors, CONFIG)), expected)


def test_int8_convrot_is_close(inference: None, tmp_path: Path, weights: StateDict, expected: torch.Tensor) -> None:
    file = stored(int8_convrot)(tmp_path, weights)
    assert describe_file(file).startswith("ComfyUI int8_tensorwise, fused qkv")
    # core rounds activations to eight bits too
    assert (output(file) - expected).norm() / expected.norm() < 0.05


def test_a_folder_gives_its_transformer(
    inference: None, tmp_path: Path, weights: StateDict, expected: torch.Tensor
) -> None:
    pytest.importorskip("diffusers")
    from ideogram4_fusion.tests.tiny_checkpoint import write_tiny_checkpoint

    write_tiny_checkpoint(tmp_path)
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    write_file(file, row_wise(weights), CONFIG)
    loaded = load_folder(tmp_path, "bf16")
    assert loaded.found.startswith("transformer: official row-wise fp8, fused qkv, 2 layers x 128, as bf16")
    for name, tensor in loaded.model.model.diffusion_model.state_dict().items():
        assert torch.equal(tensor.float(), weights[name]), name
    assert torch.equal(output(file), expected)


def test_nf4_is_refused_by_name(tmp_path: Path, weights: StateDict) -> None:
    """As bitsandbytes packs a Linear: two values a byte in one column, their maxima and what they mean beside it."""
    tensors = {name: tensor.bfloat16() for name, tensor in weights.items()}
    for name in [name for name, tensor in weights.items() if is_linear_weight(name, tensor)]:
        count = tensors[name].numel()
        tensors[name] = torch.zeros(count // 2, 1, dtype=torch.uint8)
        tensors[f"{name}.absmax"] = torch.zeros(-(-count // 64))
        tensors[f"{name}.quant_map"] = torch.zeros(16)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.zeros(80, dtype=torch.uint8)
    file = write_file(tmp_path / FILE, tensors, CONFIG)
    for call in (describe_file, load_diffusion_model):
        with pytest.raises(CheckpointError, match=r"packed by bitsandbytes \(NF4\).*Use the official fp8 file"):
            call(file)


def test_gguf_is_sent_to_its_pack(tmp_path: Path) -> None:
    file = tmp_path / "ideogram4-Q8_0.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(64))
    with pytest.raises(CheckpointError, match=r"this is a GGUF file.*ComfyUI-GGUF"):
        load_diffusion_model(file)


@pytest.mark.usefixtures("exact_on_the_cpu", "inference")
def test_a_model_of_another_pack_takes_the_fusion(weights: StateDict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Linears unpack their own weights, as those of ComfyUI-GGUF do; all that is not a Linear is fused."""
    monkeypatch.setattr(comfy.supported_models.Ideogram4, "unet_extra_config", CONFIG)
    monkeypatch.setattr(comfy.cli_args.args, "bf16_unet", True)
    model = comfy.sd.load_diffusion_model_state_dict(packed(weights), model_options={"custom_operations": PackedOps})
    model.model.manual_cast_dtype = None  # core would compute in fp32 on the CPU
    latent = {"samples": torch.zeros(1, 128, 4, 4)}
    levels = preset_sigmas(model, latent, PRESET)[[0, 4, 8]]
    text = [[torch.randn(1, 5, CONFIG["llm_features_dim"], generator=torch.Generator().manual_seed(1)), {}]]

    def render(model: comfy.model_patcher.ModelPatcher) -> torch.Tensor:
        return sample(make_guider(model, text, PRESET, levels), levels, latent, seed=3)["samples"]

    stock = render(model)
    fused, _ = set_quality(model, "lossless")
    assert torch.equal(render(fused), stock)
    assert status(fused).startswith("lossless: 2/2 blocks; modulate, gate, gate+modulate, silu-mul")
