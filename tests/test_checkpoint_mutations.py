"""Damaged headers: whatever is in them, a file is taken or refused in words, and nothing else happens.

The same mutations over half a million files, loaded in ComfyUI where they were taken, found one crash; these few stay.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from ideogram4_fusion.checkpoint.errors import CheckpointError
from ideogram4_fusion.checkpoint.inspection import inspect_checkpoint
from ideogram4_fusion.tests.mutants import mutate
from ideogram4_fusion.tests.tiny import (
    quantise_row_wise,
    quantise_scaled,
    split_names,
    tiny_config,
    tiny_state_dict,
    write_file,
)

MUTANTS = 1500


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    weights, config = tiny_state_dict(tiny_config(num_layers=1)), tiny_config(num_layers=1)
    row_wise = quantise_row_wise(weights)
    folder = tmp_path_factory.mktemp("files")
    layouts = (weights, row_wise, split_names(dict(row_wise)), quantise_scaled(weights))
    return [write_file(folder / f"{n}.safetensors", tensors, config).read_bytes() for n, tensors in enumerate(layouts)]


def test_a_damaged_header_is_taken_or_refused_in_words(files: list[bytes], tmp_path: Path) -> None:
    rng = random.Random(0)
    file = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(num_layers=1)))
    refused = 0
    for number in range(MUTANTS):
        content = mutate(rng.choice(files), rng)
        file.write_bytes(content)
        try:
            inspect_checkpoint(file)
        except CheckpointError as error:
            assert str(error), number
            refused += 1
    # Some changes do no harm, as metadata that says nothing of weights; one that takes or refuses all inspects nothing.
    assert 0.8 * MUTANTS < refused < MUTANTS
