"""`lossless` against stock over the whole model, for both of core's block versions, through core's own sampler."""

from __future__ import annotations

import types
from collections.abc import Iterator

import comfy.ldm.ideogram4.model
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from ideogram4_fusion.hosts.comfyui.quality import set_quality, status
from ideogram4_fusion.hosts.comfyui.sampling import make_guider, preset_sigmas, sample
from ideogram4_fusion.sampling.presets import PRESETS
from ideogram4_fusion.tests.comfyui.models import (
    CELLS,
    DYNAMIC,
    ON_GPU,
    conditioning,
    empty_latent,
    load,
    write_checkpoint,
)

PRESET = PRESETS["INSTANT_8"]


@pytest.fixture(scope="module", params=["installed", "earlier"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, earlier_block: types.ModuleType
) -> Iterator[ModelPatcher]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "earlier":
            cls = earlier_block.Ideogram4Transformer2DModel
            patch.setattr(comfy.ldm.ideogram4.model, "Ideogram4Transformer2DModel", cls)
        loaded = load(write_checkpoint(tmp_path_factory.mktemp(request.param)))
        with torch.inference_mode():
            # Stock's very first forward in a process differs from all later ones on an H200 (torch 2.11, both
            # patchers, first in the attention of block 0); from the second on it repeats itself to the bit.
            render(loaded, False, 1)
            render(loaded, False, 2)
        yield loaded


def render(model: ModelPatcher, masked: bool, batch: int, cells: int = CELLS, steps: int = 3) -> torch.Tensor:
    latent = empty_latent(batch, cells)
    levels = preset_sigmas(model, latent, PRESET)
    levels = torch.cat((levels[:steps], levels[-1:]))
    guider = make_guider(model, conditioning(masked), PRESET, levels)
    return sample(guider, levels, latent, seed=3)["samples"]


def untouched(model: ModelPatcher) -> bool:
    return not any("forward" in module.__dict__ for module in model.model.diffusion_model.modules())


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_lossless_equals_stock(inference: None, model: ModelPatcher, batch: int, masked: bool) -> None:
    assert model.is_dynamic() == DYNAMIC
    stock = render(model, masked, batch)
    assert stock.isfinite().all() and stock.std() > 0.1
    assert torch.equal(render(model, masked, batch), stock), "stock does not repeat itself"
    fused, _ = set_quality(model, "lossless")
    assert torch.equal(render(fused, masked, batch), stock)
    assert untouched(model)
    blocks = len(model.model.diffusion_model.layers)
    earlier = type(model.model.diffusion_model).__module__ == "earlier_ideogram4"
    rope = "; rope: ComfyUI's own" if earlier else ""
    if ON_GPU:
        exact = f"modulate, gate, gate+modulate, silu-mul{'' if earlier else ', rope'}, fp8 input exact"
    else:
        exact = "silu-mul exact; modulate, gate, gate+modulate stock (ATen adds a row up in another order on the CPU)"
        rope = rope or "; rope stock (comfy-kitchen rounds otherwise on the CPU)"
    assert status(fused) == f"lossless: {blocks}/{blocks} blocks; {exact}{rope}"


def test_sizes_follow_one_another_without_state(inference: None, model: ModelPatcher) -> None:
    """Another size, another batch and back: no shape is remembered."""
    fused, _ = set_quality(model, "lossless")
    for batch, cells in ((1, 6), (2, 4), (1, 16), (1, 6)):
        assert torch.equal(render(fused, False, batch, cells), render(model, False, batch, cells))
