"""A whole checkpoint's folder in ComfyUI, against the same folder rendered headless by diffusers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.cli_args
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from ideogram4_fusion.checkpoint.errors import CheckpointError
from ideogram4_fusion.checkpoint.folder import open_folder
from ideogram4_fusion.comparison.metrics import compare
from ideogram4_fusion.hosts.comfyui.folder import Loaded, load_folder
from ideogram4_fusion.hosts.comfyui.quality import set_quality, status
from ideogram4_fusion.hosts.comfyui.row_wise import LAYOUT
from ideogram4_fusion.hosts.comfyui.sampling import euler, make_guider, preset_sigmas
from ideogram4_fusion.hosts.comfyui.text_encoder import with_raw_taps
from ideogram4_fusion.sampling.presets import PRESETS
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers")
from ideogram4_fusion.hosts.diffusers.conditioning import encode
from ideogram4_fusion.hosts.diffusers.default_prompt import DEFAULT_PROMPT
from ideogram4_fusion.hosts.diffusers.demo import DEMO_CHECKPOINT
from ideogram4_fusion.hosts.diffusers.load import load_models
from ideogram4_fusion.hosts.diffusers.render import Renderer, Rendering
from ideogram4_fusion.hosts.diffusers.settings import Settings
from ideogram4_fusion.tests.tiny_checkpoint import write_tiny_checkpoint

CAPTION = json.dumps(
    {"high_level_description": "Ein roter Fuchs (im Schnee) - 雪", "n": ["[1]", "\\"]}, ensure_ascii=False
)
CPU = torch.device("cpu")
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the hosts are held against each other on the CPU")
LIKE = 60.0  # dB, the least that two hosts must agree to in fp32

VAE_FILE = "vae/diffusion_pytorch_model.safetensors"
TEXT_FILE = "text_encoder/model.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose normalisation of latents has another value in every channel, so that its order shows."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_tiny_checkpoint(folder)
    file = folder / VAE_FILE
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(5)
    tensors["bn.running_mean"] = 0.5 * torch.randn(128, generator=generator)
    tensors["bn.running_var"] = 0.5 + torch.rand(128, generator=generator)
    save_file(tensors, file)
    return folder


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """The same with every file a link, to be spoilt."""
    for file in tiny.rglob("*"):
        if file.is_file():
            link = tmp_path / "copy" / file.relative_to(tiny)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    return tmp_path / "copy"


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def settings(preset: str) -> Settings:
    return Settings(CAPTION, PRESETS[preset], 96, 64, 7)


def headless(folder: Path, asked: Settings, dtype: torch.dtype) -> Rendering:
    opened = open_folder(folder, asked.preset.needs_unconditional)
    conditioning = encode(opened, asked, CPU, dtype)
    return Renderer(load_models(opened, CPU, dtype), conditioning, asked, "off").render()


def in_comfyui(loaded: Loaded, asked: Settings) -> torch.Tensor:
    """[1, H, W, 3], from the noise that the headless renderer draws."""
    rows, columns = asked.grid
    transformer = loaded.model.model.diffusion_model
    noise = torch.randn(1, rows * columns, 128, generator=torch.Generator("cpu").manual_seed(asked.seed))
    latent = {"samples": torch.zeros(1, 128, rows, columns)}
    levels = preset_sigmas(loaded.model, latent, asked.preset)
    positive = loaded.clip.encode_from_tokens_scheduled(loaded.clip.tokenize(asked.prompt))
    guider = make_guider(loaded.model, positive, asked.preset, levels, loaded.unconditional)
    image_noise = transformer._tokens_to_img(noise, rows, columns)
    samples = guider.sample(image_noise, latent["samples"], euler(), levels, seed=0, disable_pbar=True)
    return loaded.vae.decode(samples).float()


@on_the_cpu
@pytest.mark.parametrize("choice", ["bf16", "fp8"])
@pytest.mark.parametrize("preset", ["INSTANT_8", "TURBO_12"])
def test_the_picture_is_the_headless_one(tiny: Path, preset: str, choice: str) -> None:
    """Same caption, noise and preset in fp32: tokenizer, taps, both transformers, guidance, schedule and VAE agree."""
    asked = settings(preset)
    expected = headless(tiny, asked, torch.float32)
    loaded = load_folder(tiny, choice, with_unconditional=asked.preset.needs_unconditional)
    found = compare(expected.image, in_comfyui(loaded, asked))
    assert expected.image.std() > 0.05
    assert found.psnr_db is not None and found.psnr_db >= LIKE, found.psnr_db
    print(f"{preset}, {choice}: {found.psnr_db:.1f} dB in fp32")


@on_the_cpu
def test_the_demos_picture_is_the_headless_one() -> None:
    """The same of trained weights, at the size and with the caption of `make demo`."""
    asked = Settings(DEFAULT_PROMPT, PRESETS["INSTANT_8"], 256, 256, 0)
    expected = headless(DEMO_CHECKPOINT, asked, torch.float32)
    found = compare(expected.image, in_comfyui(load_folder(DEMO_CHECKPOINT, "fp8"), asked))
    assert expected.image.std() > 0.05
    assert found.psnr_db is not None and found.psnr_db >= LIKE, found.psnr_db
    print(f"demo: {found.psnr_db:.1f} dB in fp32")


@on_the_cpu
def test_the_test_above_would_notice(tiny: Path) -> None:
    """A normed last tap, another caption, an unordered normalisation: each is far below the bar."""
    asked = settings("INSTANT_8")
    expected = headless(tiny, asked, torch.float32).image
    loaded = load_folder(tiny, "bf16")
    spoilt = dataclasses.replace(asked, prompt=asked.prompt + ".")
    changed = compare(expected, in_comfyui(loaded, spoilt)).psnr_db
    bn = loaded.vae.first_stage_model.bn
    for statistics in (bn.running_mean, bn.running_var):
        statistics.copy_(statistics.view(32, 4).t().reshape(-1).clone())
    unordered = compare(expected, in_comfyui(loaded, asked)).psnr_db
    for psnr in (changed, unordered):
        assert psnr is not None and psnr < LIKE - 15, (changed, unordered)


def test_how_far_bf16_is_off(tiny: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[..., None]) -> None:
    """Reported, with a bar that only a mistake would miss: core keeps the timestep in fp32, diffusers rounds it."""
    asked = settings("INSTANT_8")
    expected = headless(tiny, asked, torch.bfloat16).image
    monkeypatch.setattr(comfy.cli_args.args, "bf16_unet", True)
    loaded = load_folder(tiny, "bf16")
    loaded.model.model.manual_cast_dtype = None  # core would compute in fp32 on the CPU
    assert loaded.model.model.get_dtype_inference() == torch.bfloat16
    image, exact = in_comfyui(loaded, asked), headless(tiny, asked, torch.float32).image
    psnr = {
        "between the hosts": compare(expected, image).psnr_db,
        "ComfyUI to fp32": compare(image, exact).psnr_db,
        "diffusers to fp32": compare(expected, exact).psnr_db,
    }
    record_property("bf16_psnr_db", psnr)
    print("bf16:", ", ".join(f"{value:.1f} dB {name}" for name, value in psnr.items() if value is not None))
    assert all(value is not None and value > 20 for value in psnr.values()), psnr


def test_tokens_are_those_of_the_chat_template(tiny: Path) -> None:
    from transformers import AutoTokenizer

    clip = load_folder(tiny, "bf16").clip
    tokenizer = AutoTokenizer.from_pretrained(tiny / "tokenizer")
    for text in ("a red cat", "", CAPTION, "(a:1.3) {b|c} embedding:d", "<|endoftext|> x"):
        message = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        expected = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(expected, add_special_tokens=False)["input_ids"]
        (tokens,) = clip.tokenize(text)["qwen3vl_8b"]
        assert [token for token, _ in tokens] == ids
        # What is in a template already is left as it is.
        assert clip.tokenize(expected)["qwen3vl_8b"] == [tokens]


def test_the_text_encoder_stays_in_fp8(tiny: Path) -> None:
    clip = load_folder(tiny, "bf16").clip
    stored = load_file(tiny / TEXT_FILE)
    for layer, block in enumerate(clip.cond_stage_model.qwen3vl_8b.transformer.model.layers):
        for part in ("self_attn.q_proj", "mlp.down_proj"):
            weight = block.get_submodule(part).weight
            assert isinstance(weight, QuantizedTensor) and weight._layout_cls == LAYOUT
            name = f"language_model.layers.{layer}.{part}.weight"
            expected = stored[name].bfloat16() * stored[f"{name}_scale"].bfloat16()[:, None]
            assert torch.equal(weight.dequantize(), expected)


def test_its_taps_are_raw_already(tiny: Path) -> None:
    clip = load_folder(tiny, "bf16").clip
    same, line = with_raw_taps(clip)
    assert same is clip and "nothing to do" in line


def test_qualities_work_on_what_it_loads(tiny: Path) -> None:
    loaded = load_folder(tiny, "bf16")
    fused, _ = set_quality(loaded.model, "lossless")
    asked = settings("INSTANT_8")
    stock = in_comfyui(loaded, asked)
    assert torch.equal(in_comfyui(dataclasses.replace(loaded, model=fused), asked), stock)
    assert "2/2 blocks" in status(fused) or status(fused).startswith("stock: ")


def test_copies_without_dynamic_vram_load_again(tiny: Path) -> None:
    patcher = load_folder(tiny, "bf16").clip.patcher
    load, arguments = patcher.cached_patcher_init
    again = load(*arguments, disable_dynamic=True)
    for (name, one), other in zip(patcher.model.state_dict().items(), again.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def spoil_config(folder: Path, part: str, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / part / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    change(config)
    file.write_text(json.dumps(config), encoding="utf-8")


def spoil_tensors(folder: Path, file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / file)
    (folder / file).unlink()
    change(tensors)
    save_file(tensors, folder / file)


def swap_transformer(folder: Path) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("llm_cond_norm.weight", "llm_cond_proj.weight"):
            tensors[name] = torch.cat([tensors[name]] * 2, dim=-1)

    spoil_tensors(folder, "transformer/diffusion_pytorch_model.safetensors", widen)
    spoil_config(folder, "transformer", lambda config: config.update(llm_features_dim=832))


def shorten(folder: Path) -> None:
    spoil_tensors(folder, TEXT_FILE, lambda t: [t.pop(name) for name in list(t) if ".layers.35." in name])
    spoil_config(folder, "text_encoder", lambda config: config["text_config"].update(num_hidden_layers=35))


def empty_tokenizer(folder: Path) -> None:
    for file in (folder / "tokenizer").iterdir():
        file.unlink()


def drop(folder: Path, part: str) -> None:
    for file in sorted((folder / part).rglob("*")):
        file.unlink()
    (folder / part).rmdir()


def nan(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.full_like(tensors[name], torch.nan)


NORM = "language_model.layers.7.input_layernorm.weight"
GATE = "language_model.layers.3.mlp.gate_proj.weight"
SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no tokenizer": (lambda f: drop(f, "tokenizer"), "it has no tokenizer/"),
    "no vae": (lambda f: drop(f, "vae"), "it has no vae/"),
    "a tokenizer without files": (
        empty_tokenizer,
        "the tokenizer cannot be loaded",
    ),
    "a tensor of the text encoder lost": (
        lambda f: spoil_tensors(f, TEXT_FILE, lambda t: t.pop(NORM)),
        "1 tensor missing: layers.7.input_layernorm.weight",
    ),
    "a scale of the text encoder lost": (
        lambda f: spoil_tensors(f, TEXT_FILE, lambda t: t.pop(f"{GATE}_scale")),
        r"needs a weight_scale with a value for each row and has none \(tensor language_model.layers.3.mlp",
    ),
    "a scale of the text encoder NaN": (
        lambda f: spoil_tensors(f, TEXT_FILE, lambda t: nan(t, f"{GATE}_scale")),
        r"a scale with values that are no numbers \(NaN\) \(tensor layers.3.mlp.gate_proj.weight_scale\)",
    ),
    "too few layers": (
        shorten,
        "it has 35 layers, Ideogram 4 takes features of 36",
    ),
    "a bias": (
        lambda f: spoil_tensors(f, TEXT_FILE, lambda t: t.update({GATE.replace("weight", "bias"): torch.zeros(64)})),
        "1 tensor unknown: layers.3.mlp.gate_proj.bias",
    ),
    "packed by bitsandbytes": (
        lambda f: spoil_tensors(f, TEXT_FILE, lambda t: t.update({f"{GATE}.absmax": torch.zeros(64)})),
        r"packed by bitsandbytes \(NF4\)",
    ),
    "another rotation": (
        lambda f: spoil_config(
            f,
            "text_encoder",
            lambda c: c["text_config"].update(
                rope_parameters=None, rope_scaling={"type": "yarn"}, rope_theta=1e4, mrope_section=[4, 2, 2]
            ),
        ),
        "its rotation is 'yarn'",
    ),
    "a config of another size": (
        lambda f: spoil_config(f, "text_encoder", lambda c: c["text_config"].update(hidden_size=64)),
        "its config says hidden_size is 64, the tensors say 32",
    ),
    "a transformer of other features": (
        swap_transformer,
        "text encoder gives features of 416 channels, the transformer takes 832",
    ),
    "norms of 8 groups": (
        lambda f: spoil_config(f, "vae", lambda c: c.update(norm_num_groups=8)),
        "its norms have 8 groups, those of ComfyUI's VAE have 32",
    ),
    "a tensor of the VAE lost": (
        lambda f: spoil_tensors(f, VAE_FILE, lambda t: t.pop("decoder.mid_block.attentions.0.to_q.weight")),
        "1 tensor missing: decoder.mid.attn_1.q.weight",
    ),
    "a tensor of the VAE too small": (
        lambda f: spoil_tensors(f, VAE_FILE, lambda t: t.update({"encoder.conv_out.bias": torch.zeros(3)})),
        r"encoder.conv_out.bias is \[3\] F32, expected \[64\]",
    ),
    "a VAE of other latents": (
        lambda f: spoil_tensors(f, VAE_FILE, lambda t: t.update({"bn.running_mean": torch.zeros(64)})),
        "its normalisation is not that of tokens of 128",
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_folder_is_refused_in_words(copy: Path, what: str) -> None:
    change, said = SPOILT[what]
    change(copy)
    with pytest.raises(CheckpointError, match=said):
        load_folder(copy, "bf16")


def test_an_unconditional_that_is_absent_is_named(copy: Path) -> None:
    drop(copy, "unconditional_transformer")
    assert load_folder(copy, "bf16").unconditional is None
    with pytest.raises(CheckpointError, match="it has no unconditional_transformer/"):
        load_folder(copy, "bf16", with_unconditional=True)
