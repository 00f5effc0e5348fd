"""The command line of the headless host, end to end and where it must refuse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from ideogram4_fusion.demo_model.captions import random_caption
from ideogram4_fusion.demo_model.posters import random_poster
from ideogram4_fusion.fusion.fusion import QUALITIES
from ideogram4_fusion.hosts.diffusers import compare
from ideogram4_fusion.hosts.diffusers.command import main
from ideogram4_fusion.hosts.diffusers.default_prompt import DEFAULT_PROMPT
from ideogram4_fusion.hosts.diffusers.demo import DEMO_CHECKPOINT, unknown_words
from ideogram4_fusion.hosts.diffusers.settings import Settings, SettingsError
from ideogram4_fusion.tests.tiny_checkpoint import write_tiny_checkpoint
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent

# The repository under its import name, as conftest.py mounts it, in a process that has imported no Triton yet.
RUN = """
import sys, types
package = types.ModuleType("ideogram4_fusion")
package.__path__ = [sys.argv.pop(1)]
sys.modules["ideogram4_fusion"] = package
from ideogram4_fusion.hosts.diffusers.command import main
sys.exit(main())
"""


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """The command takes one thread for the demo's checkpoint."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_no_kernel_is_imported_before_the_device_is_chosen() -> None:
    """By TRITON_INTERPRET they decide how many rows a program takes: set too late, the demo takes ten minutes."""
    loaded = "print(*sorted(name for name in sys.modules if 'kernels' in name or name == 'triton'))"
    code = RUN.replace("sys.exit(main())", loaded)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert not [name for name in done.stdout.split() if name.startswith(("triton", "ideogram4_fusion.kernels"))]


def test_command_end_to_end_on_the_cpu(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--width", "64", "--height", "48", "--prompt", "a red cat", "--seed", "7"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT), *arguments, "--output", str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert done.stdout.splitlines()[0] == report["verdict"]
    # The kernels ran, interpreted: without TRITON_INTERPRET set in time the verdict would be NOT COMPARED.
    assert report["verdict"].startswith(("IDENTICAL", "CLOSE"))
    assert "high: 6/6 blocks" in done.stdout and "high: 6/6 blocks" in report["b"]["status"]
    assert "interpreted" in report["b"]["note"]
    assert (report["preset"], report["width"], report["height"], report["seed"]) == ("INSTANT_8", 64, 48, 7)
    assert report["prompt"] == "a red cat"
    with Image.open(tmp_path / "out" / "compare.png") as picture:
        assert picture.width == 64 + 8 + 64 and picture.height > 48
    with Image.open(tmp_path / "out" / "difference.png") as picture:
        assert picture.width == 64


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command says on standard error when it exits with 2: one line after its progress, no traceback."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    last = captured.err.splitlines()[-1]
    assert last.startswith("ideogram4-fusion: ")
    return last


def test_absent_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tmp_path / "nothing"
    message = refused(capsys, "--checkpoint", absent, "--output", tmp_path / "out")
    assert f"{absent}: there is no such folder" in message


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_broken_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str) -> None:
    write_tiny_checkpoint(tmp_path)
    (file,) = (tmp_path / part).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    size = ("--width", 64, "--height", 64)
    message = refused(capsys, "--checkpoint", tmp_path, "--output", tmp_path / "out", *size)
    assert f"{file}: the file is cut short" in message


@pytest.mark.parametrize("preset", ["DEFAULT_20", "QUALITY_48", "TURBO_12"])
def test_guided_preset_without_its_transformer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str
) -> None:
    write_tiny_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / "unconditional_transformer")
    message = refused(capsys, "--preset", preset, "--checkpoint", tmp_path, "--output", tmp_path / "out")
    assert "unconditional_transformer/" in message


def test_guided_preset_runs_on_the_tiny_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_checkpoint(tmp_path / "tiny")
    arguments = ["--checkpoint", str(tmp_path / "tiny"), "--output", str(tmp_path), "--width", "64", "--height", "48"]
    assert main(["--preset", "TURBO_12", "--qualities", "off", "off", *arguments]) == 0
    assert capsys.readouterr().out.startswith("IDENTICAL")
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert (report["preset"], len(report["a"]["seconds_per_step"])) == ("TURBO_12", 12)


@pytest.mark.parametrize(
    ("arguments", "side"),
    [((), 256), (("--checkpoint", str(DEMO_CHECKPOINT)), 256), (("--checkpoint", "elsewhere"), 1024)],
)
def test_the_default_size_is_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], side: int
) -> None:
    asked: list[tuple[Path, Settings]] = []

    def stop(root: Path, settings: Settings, *_: object) -> None:
        asked.append((root, settings))
        raise SettingsError("seen")

    monkeypatch.setattr(compare, "compare_qualities", stop)
    assert main([*arguments, "--output", str(tmp_path)]) == 2
    ((root, settings),) = asked
    assert root == (Path(arguments[1]) if arguments else DEMO_CHECKPOINT)
    assert (settings.width, settings.height) == (side, side)


@pytest.mark.parametrize(("width", "told"), [("256", False), ("512", True)])
def test_a_size_that_the_demos_model_does_not_know_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    width: str,
    told: bool,
) -> None:
    def stop(*_: object) -> None:
        raise SettingsError("seen")

    monkeypatch.setattr(compare, "compare_qualities", stop)
    assert main(["--width", width, "--output", str(tmp_path)]) == 2
    assert ("256 x 256 pixels alone" in capsys.readouterr().err) == told


def test_bad_size_or_seed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "--width", 100, "--output", tmp_path / "out")
    assert "multiples of 16, got 100 x 256" in message
    assert "seed" in refused(capsys, "--seed", 1 << 64, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_prompt_that_is_no_unicode_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # What Python makes of an argument in Latin-1.
    assert "no Unicode text from character 4 on" in refused(capsys, "--prompt", "caf\udce9", "--output", tmp_path)


@pytest.mark.parametrize(
    ("side", "words"), [(160_000_000, "not enough memory"), (160_000_000_000_000, "2,147,483,647 pixels at most")]
)
def test_size_beyond_memory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], side: int, words: str
) -> None:
    size = ("--width", side, "--height", side)  # the smaller asks for more than the 128 TiB that a process can address
    assert words in refused(capsys, *size, "--output", tmp_path, "--device", "cpu")


def test_output_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("")
    assert str(tmp_path / "out") in refused(capsys, "--output", tmp_path / "out")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_absent_cuda_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no CUDA device" in refused(capsys, "--device", "cuda", "--output", tmp_path)


@pytest.mark.parametrize("quality", QUALITIES)
def test_every_quality_is_offered(quality: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "--qualities", quality, quality, "--checkpoint", tmp_path / "nothing", "--output", tmp_path)


def test_default_prompt_is_a_caption_in_the_models_form() -> None:
    caption = json.loads(DEFAULT_PROMPT)
    assert json.dumps(caption, ensure_ascii=False, separators=(",", ":")) == DEFAULT_PROMPT
    assert list(caption) == ["high_level_description", "compositional_deconstruction"]
    assert list(caption["compositional_deconstruction"]) == ["background", "elements"]
    keys = {"obj": ["type", "bbox", "desc"], "text": ["type", "bbox", "text", "desc"]}
    for element in caption["compositional_deconstruction"]["elements"]:
        assert list(element) == keys[element["type"]]
        top, left, bottom, right = element["bbox"]
        assert 0 <= top < bottom <= 1000 and 0 <= left < right <= 1000


@pytest.mark.parametrize(
    ("prompt", "unknown"),
    [
        ("a red dragon on a green hill, the word moonlight", ["dragon", "hill", "moonlight"]),
        ("a blue circle on yellow, the word MOON", []),
        ("a red dragon and a dragon", ["dragon"]),
        ("", []),
        ('{"a":"a line\\nred \\u0041blue, h\u00e9llo, don\'t"}', ["line"]),
        (DEFAULT_PROMPT, []),
        (json.dumps(json.loads(DEFAULT_PROMPT), indent=2), []),
    ],
)
def test_words_that_the_demos_model_has_never_read_are_named(prompt: str, unknown: list[str]) -> None:
    assert unknown_words(prompt) == unknown


@pytest.mark.parametrize("content", [None, b"{", b""])
def test_a_tokenizer_that_cannot_be_read_is_the_loaders_to_refuse(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer").mkdir()
        (tmp_path / "tokenizer" / "tokenizer.json").write_bytes(content)
    assert unknown_words("a red dragon", tmp_path) == []


def test_of_its_own_captions_it_knows_every_word() -> None:
    random = Random(5)
    assert not any(unknown_words(random_caption(random_poster(random), random)) for _ in range(100))


def test_what_it_has_never_read_is_told_before_it_renders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise SettingsError("seen")

    monkeypatch.setattr(compare, "compare_qualities", stop)
    assert main(["--prompt", "a red dragon", "--output", str(tmp_path)]) == 2
    assert 'has never read "dragon": docs/demo_model.md' in capsys.readouterr().err
