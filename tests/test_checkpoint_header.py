"""Headers: what is read, and how files that are no whole safetensors files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ideogram4_fusion.checkpoint.errors import CheckpointError
from ideogram4_fusion.checkpoint.header import TensorInfo, read_header
from ideogram4_fusion.checkpoint.shards import find_shards
from ideogram4_fusion.tests.tiny import write_file


def test_reads_names_dtypes_shapes_and_metadata(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.zeros(4, 3, dtype=torch.float8_e4m3fn),
        "a.weight_scale": torch.ones(4),
        "b": torch.tensor(1.0, dtype=torch.bfloat16),
    }
    header = read_header(write_file(tmp_path / "m.safetensors", tensors, metadata={"format": "pt"}))
    assert header.tensors == {
        "a.weight": TensorInfo("F8_E4M3", (4, 3)),
        "a.weight_scale": TensorInfo("F32", (4,)),
        "b": TensorInfo("BF16", ()),
    }
    assert header.metadata == {"format": "pt"}


def test_any_shard_leads_to_the_whole_model(tmp_path: Path) -> None:
    one = write_file(tmp_path / "m-00001-of-00002.safetensors", {"a": torch.zeros(2)})
    two = write_file(tmp_path / "m-00002-of-00002.safetensors", {"b": torch.zeros(3)})
    assert find_shards(one) == find_shards(two) == (one, two)
    assert read_header(find_shards(two)).tensors.keys() == {"a", "b"}
    assert find_shards(tmp_path / "plain.safetensors") == (tmp_path / "plain.safetensors",)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    one = write_file(tmp_path / "m-00001-of-00002.safetensors", {"a": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.safetensors is missing"):
        find_shards(one)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    files = [write_file(tmp_path / name, {"a": torch.zeros(2)}) for name in ("1.safetensors", "2.safetensors")]
    with pytest.raises(CheckpointError, match=r"2\.safetensors: another part .*tensor a\)"):
        read_header(files)


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html><head></head></html>", "web page"),
        (b"\n  <html><body>Sign in</body></html>", "web page"),
        (b'{"error": "Access to this model is restricted"}', "JSON text"),
        (b"GGUF\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00", "GGUF"),
        (b"PK\x03\x04" + bytes(60), "PyTorch pickle"),
        (b"\x80\x02}q\x00." + bytes(60), "Python pickle"),
        (b"abc", "cut short within its header"),
        (bytes(range(100, 200)), "no safetensors file"),
        ((999).to_bytes(8, "little") + b'{"a":', "cut short within its header"),
        ((9).to_bytes(8, "little") + b'{"a": 1, ', "header is damaged"),
        ((8).to_bytes(8, "little") + b'{"a": 1}', "header is damaged"),
        # A header's length may begin with the first byte of a web page, "<", or of a JSON text, "{".
        ((0x3C).to_bytes(8, "little") + b'{"a":', "cut short within its header"),
        ((0x7B).to_bytes(8, "little") + b'{"a": ' + b"x" * 200, "header is damaged"),
        (with_header(b'{"a":' * 10_000), "header is damaged"),
    ],
)
def test_what_is_no_safetensors_file_is_told_apart(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


def test_truncated_file_says_how_much_is_there(tmp_path: Path) -> None:
    file = write_file(tmp_path / "m.safetensors", {"a": torch.zeros(1000)})
    whole = file.read_bytes()
    file.write_bytes(whole[:-1500])
    with pytest.raises(CheckpointError, match=f"cut short: {len(whole) - 1500:,} of {len(whole):,} bytes"):
        read_header(file)


def test_bytes_after_the_last_tensor_are_damage(tmp_path: Path) -> None:
    file = write_file(tmp_path / "m.safetensors", {"a": torch.zeros(10)})
    file.write_bytes(file.read_bytes() + b"xx")
    with pytest.raises(CheckpointError, match="damaged"):
        read_header(file)


def test_absent_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="folder"):
        read_header(tmp_path)


@pytest.mark.parametrize("offsets", [[0, "x"], [0, None], "abc", [], [0], None, {}, [0, 1.5], [0, True], [0, [8]]])
def test_offsets_that_are_no_offsets(tmp_path: Path, offsets: object) -> None:
    file = tmp_path / "m.safetensors"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": offsets}
    file.write_bytes(with_header(json.dumps({"a": entry}).encode()) + bytes(8))
    with pytest.raises(CheckpointError, match="header is damaged"):
        read_header(file)


@pytest.mark.parametrize("name", ["m-00000-of-00000.safetensors", "m-00003-of-00002.safetensors"])
def test_numbers_that_count_no_shards_are_part_of_the_name(tmp_path: Path, name: str) -> None:
    file = write_file(tmp_path / name, {"a": torch.zeros(2)})
    assert find_shards(file) == (file,)


@pytest.mark.parametrize("suffix", [".safetensors", "-00001-of-00002.safetensors"])
def test_name_that_no_file_system_holds(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(CheckpointError, match=r"no such file|is missing"):
        read_header(find_shards(tmp_path / ("m" * 300 + suffix)))


def test_an_index_names_shards_of_any_name(tmp_path: Path) -> None:
    one, two = (
        write_file(tmp_path / "first.safetensors", {"a": torch.zeros(2)}),
        write_file(tmp_path / "second.safetensors", {"b": torch.zeros(2)}),
    )
    index = {"metadata": {}, "weight_map": {"a": one.name, "b": two.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (tmp_path / "broken.safetensors.index.json").write_text("{", encoding="utf-8")
    assert find_shards(one) == find_shards(two) == (one, two)
    assert find_shards(tmp_path / "other.safetensors") == (tmp_path / "other.safetensors",)
    two.unlink()
    with pytest.raises(CheckpointError, match=r"2 parts and second\.safetensors is missing"):
        find_shards(one)


@pytest.mark.parametrize("name", ["../first.safetensors", 1, None])
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, name: object) -> None:
    one = write_file(tmp_path / "first.safetensors", {"a": torch.zeros(2)})
    index = {"weight_map": {"a": one.name, "b": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert find_shards(one) == (one,)
