"""Values that would render noise or black without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ideogram4_fusion.checkpoint.errors import CheckpointError
from ideogram4_fusion.checkpoint.values import refuse_bad_values, refuse_empty_end
from ideogram4_fusion.tests.tiny import StateDict, quantise_row_wise, quantise_scaled, tiny_config, tiny_state_dict
from safetensors.torch import save_file

FILE = Path("model.safetensors")
QKV = "layers.1.attention.qkv.weight"


@pytest.fixture
def weights() -> StateDict:
    return tiny_state_dict(tiny_config())


def test_good_files_pass(weights: StateDict) -> None:
    row_wise = quantise_row_wise(weights)
    row_wise[f"{QKV}_scale"][7] = 0  # of a row of zeros
    for tensors in (weights, row_wise, quantise_scaled(weights)):
        refuse_bad_values(FILE, tensors)


@pytest.mark.parametrize(
    ("value", "said"), [(torch.nan, r"no numbers \(NaN\)"), (torch.inf, "infinite"), (-1.0, "negative")]
)
@pytest.mark.parametrize("quantise", [quantise_row_wise, quantise_scaled])
def test_a_scale_is_named(weights: StateDict, quantise: object, value: float, said: str) -> None:
    assert callable(quantise)
    tensors = quantise(weights)
    tensors[f"{QKV}_scale"].view(-1)[-1] = value
    with pytest.raises(CheckpointError, match=f"a scale with values that are {said}") as caught:
        refuse_bad_values(FILE, tensors)
    assert caught.value.key == f"{QKV}_scale"


@pytest.mark.parametrize("name", ["layers.0.ffn_norm2.weight", "final_layer.linear.bias"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_norm_or_bias_is_named(weights: StateDict, name: str, value: float) -> None:
    weights[name][3] = value
    with pytest.raises(CheckpointError, match="a norm or bias with values that are") as caught:
        refuse_bad_values(FILE, weights)
    assert caught.value.key == name


@pytest.mark.parametrize(("bits", "said"), [(0x7F, r"NaN"), (0xFF, "NaN"), (0x81, "negative"), (0x80, None)])
def test_block_scales_of_nvfp4(bits: int, said: str | None) -> None:
    """e4m3, stored as such or as bytes; minus zero is a zero."""
    scales = torch.full((4, 8), 0x38, dtype=torch.uint8)
    scales[2, 5] = bits
    for stored in (scales, scales.view(torch.float8_e4m3fn)):
        tensors = {QKV: torch.full((4, 64), 0xFF, dtype=torch.uint8), f"{QKV}_scale": stored}
        if said is None:
            refuse_bad_values(FILE, tensors)
            continue
        with pytest.raises(CheckpointError, match=said):
            refuse_bad_values(FILE, tensors)


def test_a_file_whose_end_was_never_written(tmp_path: Path) -> None:
    """Of the right size, with a whole header. The largest bias of the model in fp32 may be zeros at the end."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1 << 18), "b": torch.zeros(18_432)}, str(file))
    refuse_empty_end([file])
    save_file({"a": torch.ones(1 << 18), "b": torch.ones(1 << 18)}, str(file))
    refuse_empty_end([file])
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    with pytest.raises(CheckpointError, match="its end is empty"):
        refuse_empty_end([file])
