"""What a user reads when a file is no good: which file, what is wrong with it, and what to do."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ideogram4_fusion.checkpoint.errors import CheckpointError
from ideogram4_fusion.hosts.comfyui.load import describe_file, load_diffusion_model, settle_row_wise
from ideogram4_fusion.tests.tiny import (
    StateDict,
    quantise_row_wise,
    quantise_scaled,
    tiny_config,
    tiny_state_dict,
    write_file,
)

CONFIG = tiny_config()
O = "layers.1.attention.o.weight"


def tensors(
    change: Callable[[StateDict], object], store: Callable[[StateDict], StateDict] = quantise_row_wise
) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        stored = store(tiny_state_dict(CONFIG))
        change(stored)
        write_file(file, stored, CONFIG)

    return write


def truncated(file: Path) -> None:
    tensors(lambda t: None)(file)
    file.write_bytes(file.read_bytes()[:-1000])


def truncated_header(file: Path) -> None:
    tensors(lambda t: None)(file)
    file.write_bytes(file.read_bytes()[:500])


def pickled(file: Path) -> None:
    file.write_bytes(pickle.dumps({"state_dict": {"a": [1.0]}}))


def torch_pickled(file: Path) -> None:
    torch.save({"a": torch.zeros(3)}, file)


def other_model(file: Path) -> None:
    write_file(file, {"double_blocks.0.img_attn.qkv.weight": torch.zeros(4, 4), "img_in.weight": torch.zeros(4, 4)})


def vae(file: Path) -> None:
    write_file(file, {"decoder.conv_in.weight": torch.zeros(4, 4, 3, 3)})


def lora(file: Path) -> None:
    write_file(file, {"transformer.layers.0.attention.to_q.lora_A.weight": torch.zeros(4, 8)})


def text_encoder(file: Path) -> None:
    write_file(file, {"model.language_model.embed_tokens.weight": torch.zeros(4, 8)})


def web_page(file: Path) -> None:
    file.write_text("<!DOCTYPE html><html>Access to this model is restricted", encoding="utf-8")


def pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9289790000\n", encoding="utf-8")


def nan(t: StateDict) -> None:
    t[f"{O}_scale"][5] = torch.nan


# What the file is -> how it is written, what is said of it, and the tensor that is named.
BAD: dict[str, tuple[Callable[[Path], object], str, str | None]] = {
    "0 bytes": (lambda file: file.write_bytes(b""), "the file is empty. Download it again", None),
    "truncated": (truncated, r"the file is cut short: [\d,]+ of [\d,]+ bytes. Download it again", None),
    "truncated in its header": (truncated_header, "cut short within its header", None),
    "a pickle": (pickled, r"this is a Python pickle .*Use the \.safetensors version", None),
    "a pickle of torch": (torch_pickled, r"this is a PyTorch pickle .*Use the \.safetensors version", None),
    "a web page": (web_page, "a web page saved under the model's name.*sign in", None),
    "a pointer": (pointer, "a Git LFS pointer.*git lfs pull", None),
    "another model": (other_model, "this is no Ideogram 4 transformer: it lacks embed_image_indicator.weight", None),
    "a VAE": (vae, "this is a VAE, no Ideogram 4 transformer.*Load VAE", "decoder.conv_in.weight"),
    "a LoRA": (lora, "this is a LoRA.*LoRA loader", "transformer.layers.0.attention.to_q.lora_A.weight"),
    "a text encoder": (text_encoder, "this is a text encoder.*Load CLIP", "model.language_model.embed_tokens.weight"),
    "a scale missing": (tensors(lambda t: t.pop(f"{O}_scale")), "an fp8 weight without its weight_scale.*noise", O),
    "all scales missing": (
        tensors(lambda t: [t.pop(name) for name in list(t) if name.endswith("_scale")]),
        "an fp8 weight without its weight_scale.*cast straight to fp8",
        "adaln_proj.weight",
    ),
    "a mark missing": (
        tensors(lambda t: t.pop(O.replace("weight", "comfy_quant")), quantise_scaled),
        "without comfy_quant, which tells ComfyUI how to compute",
        O.replace("weight", "comfy_quant"),
    ),
    "a tensor missing": (
        tensors(lambda t: t.pop("adaln_proj.bias")),
        "1 tensor missing: adaln_proj.bias",
        "adaln_proj.bias",
    ),
    "a tensor of the wrong shape": (
        tensors(lambda t: t.update({"layers.0.ffn_norm1.weight": torch.ones(64, dtype=torch.bfloat16)})),
        r"1 tensor of a wrong shape or dtype: layers\.0\.ffn_norm1\.weight is \[64\] BF16, expected \[128\]",
        "layers.0.ffn_norm1.weight",
    ),
    "NaN scales": (tensors(nan), r"a scale with values that are no numbers \(NaN\)", f"{O}_scale"),
    "NaN scales, per tensor": (
        tensors(lambda t: t.update({f"{O}_scale": torch.tensor(torch.nan)}), quantise_scaled),
        r"a scale with values that are no numbers \(NaN\)",
        f"{O}_scale",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_says_why(tmp_path: Path, what: str) -> None:
    write, said, key = BAD[what]
    file = tmp_path / "ideogram4.safetensors"
    write(file)
    for choice in ("bf16", "fp8"):
        with pytest.raises(CheckpointError, match=said) as caught:
            load_diffusion_model(file, choice)
        assert str(caught.value).startswith(f"{file}: ")
        assert caught.value.key == key
    if "NaN" not in what:  # of which the header knows nothing
        for call in (describe_file, lambda f: settle_row_wise(f, "auto")):
            with pytest.raises(CheckpointError, match=said):
                call(file)
