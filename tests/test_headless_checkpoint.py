"""The headless host's loading: the tiny checkpoint, against diffusers' own classes filled by hand."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Ideogram4Transformer2DModel
from ideogram4_fusion.checkpoint.errors import CheckpointError
from ideogram4_fusion.checkpoint.folder import open_folder
from ideogram4_fusion.hosts.diffusers.conditioning import encode, load_text_encoder
from ideogram4_fusion.hosts.diffusers.load import load_models, load_transformer, load_vae
from ideogram4_fusion.hosts.diffusers.settings import Settings, SettingsError
from ideogram4_fusion.sampling.presets import PRESETS
from ideogram4_fusion.tests.tiny_checkpoint import DIMENSIONS, write_tiny_checkpoint
from safetensors.torch import load_file, save_file
from torch import nn

CPU = torch.device("cpu")
WEIGHTS = "diffusion_pytorch_model.safetensors"
SETTINGS = Settings("a red cat", PRESETS["INSTANT_8"], 64, 64, 0)

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny, tmp_path / "copy")


def rewrite(file: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, file)


def split(tensors: Tensors) -> Tensors:
    """The same transformer, scales included, under diffusers' names."""
    hidden = DIMENSIONS.hidden_size
    out: Tensors = {}
    for name, tensor in tensors.items():
        if ".attention.qkv." in name:
            for third, part in enumerate("qkv"):
                out[name.replace("qkv", f"to_{part}")] = tensor[third * hidden : (third + 1) * hidden]
        else:
            out[name.replace("attention.o.", "attention.to_out.0.")] = tensor
    return out


def dequantise(tensors: Tensors) -> Tensors:
    out = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale")}
    for name, tensor in out.items():
        if tensor.dtype == torch.float8_e4m3fn:
            out[name] = tensor.bfloat16() * tensors[f"{name}_scale"].bfloat16()[:, None]
    return out


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Five text tokens in front of a 3 x 4 picture."""
    text, rows, columns = 5, 3, 4
    generator = torch.Generator().manual_seed(1)
    tokens = text + rows * columns
    position_ids = torch.arange(text)[:, None].expand(text, 3)
    grid = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns)) + 65536
    return {
        "hidden_states": torch.randn(1, tokens, DIMENSIONS.in_channels, generator=generator).to(dtype),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "encoder_hidden_states": torch.randn(1, tokens, DIMENSIONS.llm_features_dim, generator=generator).to(dtype),
        "position_ids": torch.cat([position_ids, grid])[None],
        "segment_ids": torch.ones(1, tokens, dtype=torch.long),
        "indicator": torch.tensor([[3] * text + [2] * rows * columns]),
    }


@torch.no_grad()
def run(model: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    out: torch.Tensor = model(**inputs(dtype), return_dict=False)[0]
    return out


def by_hand(tiny: Path) -> Ideogram4Transformer2DModel:
    model = Ideogram4Transformer2DModel(**DIMENSIONS.as_config())
    model.load_state_dict(dequantise(split(load_file(tiny / "transformer" / WEIGHTS))))
    return model.eval()


def test_transformer_is_near_diffusers_own_in_float32(tiny: Path) -> None:
    loaded, checkpoint = load_transformer(tiny / "transformer" / WEIGHTS, CPU)
    assert checkpoint.describe() == "official row-wise fp8, fused qkv, 2 layers x 128"
    reference = run(by_hand(tiny), torch.float32)
    error = (run(loaded, torch.bfloat16).float() - reference).norm() / reference.norm()
    assert error < 0.02  # frequencies in bf16 would give 0.1 and more


def test_transformer_equals_diffusers_own_with_torch_norms(tiny: Path) -> None:
    reference = by_hand(tiny)
    frequencies = reference.rotary_emb.inv_freq.clone()
    for name, module in list(reference.named_modules()):
        if type(module).__name__ == "RMSNorm":
            norm = nn.RMSNorm(module.dim, eps=module.eps)
            norm.weight = module.weight
            reference.set_submodule(name, norm)
    reference.bfloat16().rotary_emb.inv_freq = frequencies
    loaded, _ = load_transformer(tiny / "transformer" / WEIGHTS, CPU)
    assert torch.equal(run(loaded, torch.bfloat16), run(reference, torch.bfloat16))


def shard(file: Path) -> Path:
    tensors = load_file(file)
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        save_file({name: tensors[name] for name in part}, file.with_name(f"model-{number:05d}-of-00002.safetensors"))
    file.unlink()
    return file.with_name("model-00001-of-00002.safetensors")


@pytest.mark.parametrize("naming", ["split", "plain", "shards", "with a wish for ComfyUI's attention"])
def test_every_layout_loads_to_the_same_bytes(tiny: Path, copy: Path, naming: str) -> None:
    file = copy / "transformer" / WEIGHTS
    if naming == "split":
        rewrite(file, split)
    elif naming == "plain":
        rewrite(file, dequantise)
    elif naming.startswith("with"):
        wish = torch.zeros(2, dtype=torch.uint8)
        rewrite(file, lambda tensors: {**tensors, "layers.0.attention.comfy_attention.config": wish})
    else:
        assert shard(file) == open_folder(copy).transformer
    official = load_transformer(open_folder(tiny).transformer, CPU)[0].state_dict()
    other = load_transformer(open_folder(copy).transformer, CPU)[0].state_dict()
    assert official.keys() == other.keys()
    assert all(torch.equal(official[name], other[name]) for name in official)


@pytest.mark.parametrize("mark", ["fp8", "int8"])
def test_weights_that_are_quantised_for_comfyui_are_refused(copy: Path, mark: str) -> None:
    """int8 with a scale that could pass for a row's, whose rotation nothing here would undo."""
    module = "layers.0.feed_forward.w1"
    stored, form = {
        "fp8": (torch.float8_e4m3fn, {"format": "float8_e4m3fn"}),
        "int8": (torch.int8, {"format": "int8_tensorwise", "convrot": True}),
    }[mark]

    def change(tensors: Tensors) -> Tensors:
        plain = dequantise(tensors)
        plain[f"{module}.weight"] = plain[f"{module}.weight"].to(stored)
        plain[f"{module}.weight_scale"] = torch.ones(())
        plain[f"{module}.comfy_quant"] = torch.tensor(list(json.dumps(form).encode()), dtype=torch.uint8)
        return plain

    rewrite(copy / "transformer" / WEIGHTS, change)
    with pytest.raises(CheckpointError, match="made for ComfyUI's quantised operations"):
        load_transformer(copy / "transformer" / WEIGHTS, CPU)


def test_plain_text_encoder_gives_the_same_features_as_fp8(tiny: Path, copy: Path) -> None:
    rewrite(copy / "text_encoder" / "model.safetensors", dequantise)
    a, b = encode(open_folder(tiny), SETTINGS, CPU), encode(open_folder(copy), SETTINGS, CPU)
    assert a.features.shape == (1, a.text_tokens + 16, DIMENSIONS.llm_features_dim)
    assert a.features[:, : a.text_tokens].count_nonzero() > 0
    assert torch.equal(a.features, b.features)


def test_incomplete_text_encoder_is_refused(copy: Path) -> None:
    lost = "language_model.layers.7.mlp.up_proj.weight"
    rewrite(
        copy / "text_encoder" / "model.safetensors",
        lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)},
    )
    with pytest.raises(CheckpointError, match=lost):
        load_text_encoder(open_folder(copy), CPU)


@pytest.mark.parametrize("damage", ["lost", "one for all", "without its weight"])
def test_every_fp8_weight_of_the_text_encoder_has_its_scales(copy: Path, damage: str) -> None:
    weight = "language_model.layers.7.mlp.up_proj.weight"
    file = copy / "text_encoder" / "model.safetensors"

    def change(tensors: Tensors) -> Tensors:
        scale = tensors.pop(f"{weight}_scale")
        if damage == "one for all":
            tensors[f"{weight}_scale"] = scale[:1]
        if damage == "without its weight":
            tensors[f"{weight}_scale"] = scale
            tensors[weight] = tensors[weight].bfloat16()
        return tensors

    rewrite(file, change)
    with pytest.raises(CheckpointError, match=weight) as caught:
        load_text_encoder(open_folder(copy), CPU)
    assert caught.value.file == file


@pytest.mark.parametrize("lost", ["decoder.conv_out.weight", "bn.running_mean", "bn.running_var"])
def test_incomplete_vae_is_refused(copy: Path, lost: str) -> None:
    def change(tensors: Tensors) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if name not in (lost, "bn.num_batches_tracked")}

    rewrite(copy / "vae" / WEIGHTS, lambda tensors: {**change(tensors), lost: tensors[lost]})
    load_vae(copy / "vae", CPU)
    rewrite(copy / "vae" / WEIGHTS, change)
    with pytest.raises(CheckpointError, match=lost):
        load_vae(copy / "vae", CPU)


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


@pytest.mark.parametrize("change", ["{}", "no template", "broken template", "empty template"])
def test_unusable_tokenizer_is_named(copy: Path, change: str) -> None:
    folder = copy / "tokenizer"
    template = folder / "chat_template.jinja"
    if change == "{}":
        (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    elif change == "no template":
        template.unlink()
    else:
        template.write_text("{% for" if change == "broken template" else "{% if 0 %}{% endif %}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded") as caught:
        encode(open_folder(copy), SETTINGS, CPU)
    assert caught.value.file == folder


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 35},
        {"num_hidden_layers": "many"},
        {"num_attention_heads": 0},
        {"hidden_act": "nonsense"},
        {"hidden_size": -1},
        {"rms_norm_eps": "small"},
    ],
    ids=str,
)
def test_nonsense_in_the_text_encoders_config(copy: Path, changes: dict[str, Any]) -> None:
    file = copy / "text_encoder" / "config.json"
    edit_json(file, text_config={**json.loads(file.read_text(encoding="utf-8"))["text_config"], **changes})
    with pytest.raises(CheckpointError, match="the text encoder cannot be loaded") as caught:
        encode(open_folder(copy), SETTINGS, CPU)
    assert caught.value.file == file.parent


@pytest.mark.parametrize(
    "changes",
    [{"latent_channels": "many"}, {"block_out_channels": 7}, {"norm_num_groups": 0}, {"act_fn": []}],
    ids=str,
)
def test_nonsense_in_the_vaes_config(copy: Path, changes: dict[str, Any]) -> None:
    edit_json(copy / "vae" / "config.json", **changes)
    with pytest.raises(CheckpointError, match="the VAE cannot be loaded"):
        load_vae(copy / "vae", CPU)


def test_long_prompt_is_refused(tiny: Path) -> None:
    with pytest.raises(SettingsError, match="at most 2,048"):
        encode(open_folder(tiny), dataclasses.replace(SETTINGS, prompt="~" * 2048), CPU)


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "tokenizer", "vae"])
def test_missing_part_is_named(copy: Path, part: str) -> None:
    shutil.rmtree(copy / part)
    with pytest.raises(CheckpointError, match=f"it has no {part}/"):
        open_folder(copy)


@pytest.mark.parametrize("part", ["text_encoder", "tokenizer", "vae"])
def test_part_without_its_configuration_is_refused(copy: Path, part: str) -> None:
    for file in (copy / part).glob("*.json"):
        file.unlink()
    with pytest.raises(CheckpointError, match=str(copy / part)):
        encode(open_folder(copy), SETTINGS, CPU)
        load_models(open_folder(copy), CPU)


def test_two_models_in_one_folder_are_refused(copy: Path) -> None:
    shutil.copy(copy / "transformer" / WEIGHTS, copy / "transformer" / "other.safetensors")
    with pytest.raises(CheckpointError, match="it holds 2 models"):
        open_folder(copy)


def test_guided_preset_needs_the_unconditional_transformer(copy: Path) -> None:
    assert open_folder(copy, with_unconditional=True).unconditional is not None
    shutil.rmtree(copy / "unconditional_transformer")
    assert open_folder(copy).unconditional is None
    with pytest.raises(CheckpointError, match="unconditional_transformer"):
        open_folder(copy, with_unconditional=True)


def test_the_two_transformers_differ(tiny: Path) -> None:
    conditional, unconditional = (load_file(tiny / f"{part}transformer" / WEIGHTS) for part in ("", "unconditional_"))
    assert conditional.keys() == unconditional.keys()
    assert not torch.equal(conditional["adaln_proj.bias"], unconditional["adaln_proj.bias"])


def test_tiny_checkpoint_depends_on_its_seed_alone(tiny: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        write_tiny_checkpoint(tmp_path / str(seed), seed)
    for file in ("transformer/" + WEIGHTS, "vae/" + WEIGHTS, "text_encoder/model.safetensors"):
        first, again, other = ((folder / file).read_bytes() for folder in (tiny, tmp_path / "0", tmp_path / "1"))
        assert first == again != other
