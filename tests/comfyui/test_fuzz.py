"""A short run of fuzz.py, whose ten minutes are for a person to spend."""

from __future__ import annotations

from pathlib import Path

import torch
from ideogram4_fusion.tests.comfyui.fuzz import difference, fuzz, transformers, values
from ideogram4_fusion.tests.mutants import mutate_data

FILES = 120


def test_a_damaged_file_is_refused_in_words_or_loaded_as_what_it_holds(tmp_path: Path) -> None:
    outcome = fuzz(transformers(tmp_path / "files"), seconds=600, seed=1, keep=tmp_path, most=FILES)
    assert outcome.wrong == []
    assert outcome.refused + outcome.loaded == FILES
    assert outcome.refused > FILES / 4 and outcome.loaded > FILES / 20


def test_the_fuzzer_would_notice(tmp_path: Path) -> None:
    """A loader that swaps two tensors, raises something else, or reads another file than it is given."""
    parts = transformers(tmp_path / "files")
    part = parts[0]
    with torch.inference_mode():
        loaded, stored = dict(part.load(part.file)), part.read(part.content)
        assert difference(loaded, stored) is None
        one, other = "layers.0.attention_norm1.weight", "layers.0.ffn_norm1.weight"
        loaded[one], loaded[other] = loaded[other], loaded[one]
    assert difference(loaded, stored) == f"{one} is not what the file holds"
    del loaded[one]
    assert "other tensors" in str(difference(loaded, stored))
    assert values(torch.nn.Linear(2, 2)).keys() == {"weight", "bias"}

    def broken(file: Path) -> dict[str, torch.Tensor]:
        raise RuntimeError("shape mismatch")

    spoilt = [type(part)(part.content, part.file, broken, part.read)]
    outcome = fuzz(spoilt, seconds=60, seed=0, keep=tmp_path, most=3)
    assert len(outcome.wrong) == 3 and all("RuntimeError: shape mismatch" in line for line in outcome.wrong)


def test_data_is_changed_in_one_tensor_alone(tmp_path: Path) -> None:
    import random

    part = transformers(tmp_path / "files")[0]
    before, rng = part.read(part.content), random.Random(0)
    for _ in range(10):
        after = part.read(mutate_data(part.content, rng))
        assert sum(not torch.equal(before[name].double(), after[name].double()) for name in before) <= 1
