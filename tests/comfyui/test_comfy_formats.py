"""ComfyUI's own nvfp4 and int8 files: handed on to core's quantised operations as they are, or refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from ideogram4_fusion.checkpoint.errors import CheckpointError
from ideogram4_fusion.hosts.comfyui.load import describe_file, load_diffusion_model
from ideogram4_fusion.tests.comfyui.test_load import CONFIG, distance, inputs, reference
from ideogram4_fusion.tests.tiny import StateDict, dequantise, quantise_scaled, tiny_state_dict, write_file

Rule = Callable[[str], str]  # a Linear's name -> its format, or "bf16"
LAYOUT_OF = {"nvfp4": "TensorCoreNVFP4Layout", "int8_tensorwise": "TensorWiseINT8Layout"}


def _nvfp4_mixed(module: str) -> str:
    """As Comfy-Org's: the large Linears of the blocks in nvfp4, the rest per-tensor fp8."""
    return "nvfp4" if ".attention." in module or ".feed_forward." in module else "float8_e4m3fn"


def _int8_convrot(module: str) -> str:
    """As Comfy-Org's: all Linears of the blocks, rotated, one scale a row; the rest bf16."""
    return "int8_tensorwise" if module.startswith("layers.") else "bf16"


FILES: dict[str, tuple[Rule, str]] = {
    "nvfp4_mixed": (_nvfp4_mixed, "ComfyUI nvfp4 and fp8, fused qkv, 2 layers x 128"),
    "int8_convrot": (_int8_convrot, "ComfyUI int8_tensorwise, fused qkv, 2 layers x 128"),
}


@pytest.fixture
def weights() -> StateDict:
    return tiny_state_dict(CONFIG)


def stored(weights: StateDict, rule: Rule) -> tuple[StateDict, StateDict]:
    """The file's tensors, and the fp32 weights that they stand for."""
    file, scaled = {}, quantise_scaled(weights)
    values = dequantise(scaled, torch.float32)
    for name in [name for name in scaled if not name.endswith(("_scale", ".comfy_quant"))]:
        module = name.removesuffix(".weight")
        form = rule(module) if f"{name}_scale" in scaled else "bf16"
        if form == "bf16":
            file[name] = weights[name].bfloat16()
            values[name] = file[name].float()
        elif form == "float8_e4m3fn":
            file |= {key: scaled[key] for key in (name, f"{name}_scale", f"{module}.comfy_quant")}
        else:
            mark: dict[str, object] = {"format": form}
            options: dict[str, object] = {"scale": "recalculate"}
            if form == "int8_tensorwise":
                mark |= {"convrot": True, "convrot_groupsize": 16}
                options = {"is_weight": True, "per_channel": True, "convrot": True, "convrot_groupsize": 16}
            quantised = QuantizedTensor.from_float(weights[name].bfloat16(), LAYOUT_OF[form], **options)
            file |= {key: tensor.contiguous() for key, tensor in quantised.state_dict(name).items()}
            file[f"{module}.comfy_quant"] = torch.tensor(list(json.dumps(mark).encode()), dtype=torch.uint8)
            values[name] = quantised.dequantize().float()
    return file, values


@pytest.mark.parametrize("kind", FILES)
def test_core_computes_with_what_the_file_holds(inference: None, tmp_path: Path, weights: StateDict, kind: str) -> None:
    rule, description = FILES[kind]
    tensors, values = stored(weights, rule)
    file = write_file(tmp_path / "model.safetensors", tensors, CONFIG)
    assert describe_file(file) == description
    model = load_diffusion_model(file).model.diffusion_model
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        expected = values.get(f"{name}.weight")
        if isinstance(weight, QuantizedTensor) and rule(name) in LAYOUT_OF:
            assert weight._layout_cls == LAYOUT_OF[rule(name)], name
            assert expected is not None
            torch.testing.assert_close(weight.dequantize().float(), expected, rtol=2**-7, atol=0)
    # core rounds activations to 8 bits on the int8 path.
    assert distance(model(*inputs()), reference(values)(*inputs())) < 0.05


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("nvfp4_mixed", "layers.0.attention.qkv.weight_scale_2"),
        ("nvfp4_mixed", "layers.1.feed_forward.w2.weight_scale"),
        ("nvfp4_mixed", "adaln_proj.weight_scale"),
        ("int8_convrot", "layers.0.adaln_modulation.weight_scale"),
    ],
)
def test_a_lost_scale_is_named(tmp_path: Path, weights: StateDict, kind: str, lost: str) -> None:
    tensors, _ = stored(weights, FILES[kind][0])
    del tensors[lost]
    with pytest.raises(CheckpointError, match=lost.replace(".", r"\.").rpartition(r"\.")[2]) as caught:
        describe_file(write_file(tmp_path / "model.safetensors", tensors, CONFIG))
    assert caught.value.key in (lost, lost.removesuffix("_scale"))


def test_a_mark_of_another_format_is_refused(tmp_path: Path, weights: StateDict) -> None:
    """core would take nvfp4's bytes for something else."""
    tensors, _ = stored(weights, _nvfp4_mixed)
    mark = json.dumps({"format": "int8_tensorwise"}).encode()
    tensors["layers.0.attention.o.comfy_quant"] = torch.tensor(list(mark), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="the mark of a nvfp4 weight says 'int8_tensorwise'"):
        describe_file(write_file(tmp_path / "model.safetensors", tensors, CONFIG))


def test_a_weight_of_another_size_is_refused(tmp_path: Path, weights: StateDict) -> None:
    tensors, _ = stored(weights, _nvfp4_mixed)
    name = "layers.1.attention.o.weight"
    tensors[name] = tensors[name][:, :-8].contiguous()
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.attention\.o\.weight is \[128, 56\] U8, expected \[128, 64\]"
    ):
        describe_file(write_file(tmp_path / "model.safetensors", tensors, CONFIG))
