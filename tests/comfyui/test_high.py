"""`high` in core: its attention and who else may choose one, and that it repeats itself."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import comfy.ldm.modules.attention
import ideogram4_fusion.fusion.fusion
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from ideogram4_fusion.benchmarks.random_checkpoint import write_random_checkpoint
from ideogram4_fusion.fusion.chains import load_chains
from ideogram4_fusion.fusion.pieces import ALL, NONE, Pieces
from ideogram4_fusion.hosts.comfyui import attention
from ideogram4_fusion.hosts.comfyui.attention import OVERRIDE, attention_of, core_default
from ideogram4_fusion.hosts.comfyui.load import load_diffusion_model
from ideogram4_fusion.hosts.comfyui.quality import pieces_of, set_quality, status
from ideogram4_fusion.tests.comfyui.models import ON_GPU
from ideogram4_fusion.tests.comfyui.renders import render, untouched
from ideogram4_fusion.tests.comfyui.wrong_kernels import replace_kernel

pytestmark = pytest.mark.usefixtures("exact_on_the_cpu")

hopper = pytest.mark.skipif(
    not ON_GPU or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU, where cuDNN was measured"
)


@pytest.fixture
def silu_mul_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that differs, so that a first forward is repeated unless somebody looks on."""
    eager = load_chains()["silu-mul"].eager
    replace_kernel(monkeypatch, "silu-mul", lambda *args: eager(*args) * 1.01)


def seen(model: ModelPatcher, calls: list[int]) -> list[int]:
    """How many `calls` there are in each of two renders."""
    counts = []
    for _ in range(2):
        calls.clear()
        render(model)
        counts.append(len(calls))
    return counts


def override_of(model: ModelPatcher) -> Any:
    return model.model_options.get("transformer_options", {}).get(OVERRIDE)


def test_it_puts_its_attention_on_its_own_clone_and_takes_it_off_again(model: ModelPatcher) -> None:
    high, _ = set_quality(model, "high")
    assert attention_of(high) is not None and override_of(model) is None
    for quality in ("off", "lossless"):
        assert override_of(set_quality(high, quality)[0]) is None
    assert override_of(set_quality(high, "high", pieces=Pieces("stock"))[0]) is None
    assert attention_of(high) is not None


def test_an_attention_that_another_node_chose_is_kept(model: ModelPatcher) -> None:
    calls: list[int] = []

    def theirs(stock: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return stock(*args, **kwargs)

    before, after = model.clone(), set_quality(model, "high")[0]
    before.model_options["transformer_options"][OVERRIDE] = theirs
    after.model_options["transformer_options"][OVERRIDE] = theirs
    for chosen in (set_quality(before, "high")[0], after):
        calls.clear()
        render(chosen)
        assert calls and override_of(chosen) is theirs
        assert status(chosen).endswith("attention: another node's")
    assert override_of(set_quality(after, "off")[0]) is theirs


def test_with_nothing_chosen_it_is_stock_to_the_bit(model: ModelPatcher) -> None:
    high, _ = set_quality(model, "high", pieces=NONE)
    assert torch.equal(render(high), render(model)) and untouched(model)
    assert "attention" not in status(high)


def test_the_comparison_keeps_the_pieces_that_were_chosen(model: ModelPatcher) -> None:
    chosen = Pieces("stock", fast_accumulation=False)
    assert pieces_of(set_quality(model, "high", pieces=chosen)[0]) == chosen
    assert pieces_of(set_quality(model, "lossless", pieces=chosen)[0]) == chosen
    assert pieces_of(set_quality(model, "off", pieces=chosen)[0]) == pieces_of(model) == ALL


def test_it_repeats_itself_from_the_first_render_on(model: ModelPatcher) -> None:
    high, _ = set_quality(model, "high")
    first = render(high)
    assert torch.equal(render(high), first)
    assert torch.equal(render(set_quality(model, "high")[0]), first)


@pytest.mark.skipif(ON_GPU, reason="there it runs")
def test_where_cudnn_does_not_run_attention_is_core_s_and_the_status_says_so(model: ModelPatcher) -> None:
    high, _ = set_quality(model, "high", pieces=Pieces("cudnn"))
    for _ in range(2):
        assert status(high).endswith("attention: ComfyUI's (the model is not on an NVIDIA GPU)")
        assert torch.equal(render(high), render(model))


class _OnAnyGpu(torch.Tensor):
    """A tensor that says it lies on an NVIDIA GPU."""

    device = torch.device("cuda")  # type: ignore[assignment]


def called(
    choice: str, stock: Any, monkeypatch: pytest.MonkeyPatch, **named: Any
) -> tuple[torch.Tensor, attention.CudnnAttention]:
    """An override's answer to a call as Ideogram 4's, on what passes for a Hopper GPU whose cuDNN gives ones."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "cudnn_attention", lambda q, k, v: torch.ones(1, 2, 3, 256))
    ours = attention.CudnnAttention(choice)
    q = torch.zeros(1, 2, 3, 256).as_subclass(_OnAnyGpu)
    return ours(stock, q, q, q, 2, named.pop("mask", None), skip_reshape=True, **named), ours


def theirs(*args: Any, **named: Any) -> torch.Tensor:
    return torch.full((1, 3, 512), 2.0)


def test_auto_takes_cudnn_where_core_s_default_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    out, ours = called("auto", core_default(), monkeypatch)
    assert ours.status == "cuDNN" and out.shape == (1, 3, 512) and bool((out == 1).all())


@pytest.mark.parametrize(
    ("choice", "named", "words"),
    [
        ("auto", {}, "was chosen when ComfyUI was started"),
        ("cudnn", {"mask": torch.zeros(1)}, "it has a mask"),
        ("cudnn", {"scale": 0.5}, "called otherwise"),
        ("cudnn", {"skip_output_reshape": True}, "called otherwise"),
    ],
    ids=["another attention", "mask", "scale", "shape"],
)
def test_it_leaves_to_core_what_it_does_not_stand_for(
    monkeypatch: pytest.MonkeyPatch, choice: str, named: dict[str, Any], words: str
) -> None:
    out, ours = called(choice, theirs, monkeypatch, **named)
    assert bool((out == 2).all()) and ours.status.startswith("ComfyUI's (") and words in ours.status


def test_cudnn_that_found_no_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    full = [RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")]

    def cudnn(q: torch.Tensor, *_: object) -> torch.Tensor:
        if full:
            raise full.pop()
        return torch.zeros_like(q)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "cudnn_attention", cudnn)
    ours = attention.CudnnAttention("cudnn")
    q = torch.zeros(1, 2, 3, 64).as_subclass(_OnAnyGpu)
    for expected in (2, 0):
        assert bool((ours(theirs, q, q, q, 2, None, skip_reshape=True) == expected).all())
    assert ours.status == "cuDNN, else ComfyUI's (cuDNN found too little memory)"


def test_cudnn_that_fails_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def fail(*_: object) -> torch.Tensor:
        tries.append(1)
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "cudnn_attention", fail)
    ours = attention.CudnnAttention("cudnn")
    q = torch.zeros(1, 2, 3, 64).as_subclass(_OnAnyGpu)
    for _ in range(3):
        assert bool((ours(theirs, q, q, q, 2, None, skip_reshape=True) == 2).all())
    assert len(tries) == 1 and ours.status == "ComfyUI's (cuDNN fails here: No available kernel)"


def test_calls_that_alternate_do_not_change_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guidance with a mask on one side: taken, declined, taken, declined."""
    _, ours = called("cudnn", theirs, monkeypatch)
    q = torch.zeros(1, 2, 3, 256).as_subclass(_OnAnyGpu)
    seen = []
    for mask in (torch.zeros(1), None) * 2:
        ours(theirs, q, q, q, 2, mask, skip_reshape=True)
        seen.append(ours.status)
    assert set(seen) == {"cuDNN, else ComfyUI's (it has a mask: core chooses)"}


def test_an_attention_that_the_checkpoint_asks_for_is_kept(model: ModelPatcher) -> None:
    """As newer cores find it: a preference beside the block's attention."""
    asks = types.SimpleNamespace(function=theirs)
    block = model.model.diffusion_model.layers[0].attention
    object.__setattr__(block, "comfy_attention", asks)
    try:
        assert attention.attention_of(set_quality(model, "high")[0]) is None
    finally:
        object.__delattr__(block, "comfy_attention")
    assert attention.attention_of(set_quality(model, "high")[0]) is not None
    lora = model.clone()
    lora.add_object_patch("diffusion_model.layers.0.attention.comfy_attention", asks)
    high, line = set_quality(lora, "high")
    assert attention.attention_of(high) is None and "another node patched" not in line
    object.__setattr__(block, "comfy_attention", types.SimpleNamespace(function=None))
    try:
        for patch, kept in ((theirs, True), (None, False)):
            node = model.clone()
            node.add_object_patch("diffusion_model.layers.0.attention.comfy_attention.function", patch)
            assert (attention.attention_of(set_quality(node, "high")[0]) is None) is kept
    finally:
        object.__delattr__(block, "comfy_attention")


def test_another_packs_attention_is_called_once_a_step(model: ModelPatcher) -> None:
    calls: list[int] = []

    def counting(stock: Any, *args: Any, **named: Any) -> Any:
        calls.append(1)
        return stock(*args, **named)

    def counted(quality: str) -> int:
        watched, _ = set_quality(model, quality)
        watched.model_options["transformer_options"][OVERRIDE] = counting
        calls.clear()
        render(watched)
        return len(calls)

    assert counted("high") == counted("off") > 0


@pytest.mark.parametrize(
    "name", ["forward", "_forward", "final_layer.forward", "layers.1.attention.forward", "layers.0.attention.o.forward"]
)
def test_another_packs_patch_sees_each_step_once(model: ModelPatcher, silu_mul_off: None, name: str) -> None:
    high, _ = set_quality(model, "high")
    calls: list[int] = []
    stock = model.get_model_object(f"diffusion_model.{name}")

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(1)
        return stock(*args, **named)

    high.add_object_patch(f"diffusion_model.{name}", counted)
    first, second = seen(high, calls)
    assert first == second > 0


def test_core_still_hands_an_override_what_this_one_stands_for(model: ModelPatcher) -> None:
    """The names and the order in which Ideogram 4's attention calls it."""
    seen: list[tuple[Any, ...]] = []

    def spy(stock: Any, *args: Any, **named: Any) -> Any:
        seen.append((stock, args, named))
        return stock(*args, **named)

    watched = model.clone()
    watched.model_options["transformer_options"][OVERRIDE] = spy
    render(watched)
    _, (q, _, _, heads, mask), named = seen[0]
    assert q.ndim == 4 and q.shape[1] == heads and mask is None and named["skip_reshape"]
    assert not any(named[name] for name in named.keys() - attention._NEUTRAL)
    assert callable(core_default()) and core_default() is not comfy.ldm.modules.attention.attention_pytorch


@hopper
def test_on_a_hopper_gpu_it_takes_cudnn_and_stays_close(model: ModelPatcher) -> None:
    high, _ = set_quality(model, "high", pieces=Pieces("auto", False, False, False))
    out, stock = render(high), render(model)
    assert status(high).endswith("attention: cuDNN")
    assert not torch.equal(out, stock)
    assert float((out - stock).norm() / stock.norm()) < 0.1


@hopper
@pytest.mark.parametrize("pieces", [Pieces("stock", False, True, False), ALL], ids=["row-wise fp8", "all"])
def test_row_wise_weights_are_multiplied_as_they_are(tmp_path: Path, inference: None, pieces: Pieces) -> None:
    kept = load_diffusion_model(write_random_checkpoint(tmp_path / "rows.safetensors", 4, "fp8_row_wise"), "fp8")
    stock = render(kept)
    high, _ = set_quality(kept, "high", pieces=pieces)
    out = render(high)
    assert "products of row-wise fp8" in status(high)
    assert torch.equal(render(high), out) and torch.equal(render(set_quality(kept, "high", pieces=pieces)[0]), out)
    assert 0 < float((out - stock).norm() / stock.norm()) < 0.2
    assert torch.equal(render(set_quality(kept, "high", pieces=NONE)[0]), render(kept))


def test_another_pack_s_wrapper_sees_every_step_once(model: ModelPatcher, silu_mul_off: None) -> None:
    high, _ = set_quality(model, "high")
    calls: list[int] = []

    def count(executor: Any, *args: Any, **named: Any) -> Any:
        calls.append(1)
        return executor(*args, **named)

    high.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "theirs", count)
    first, second = seen(high, calls)
    assert first == second > 0


def test_a_patch_that_was_taken_off_again_is_nobody_who_looks_on(model: ModelPatcher, silu_mul_off: None) -> None:
    """core leaves the class's own forward behind on the module."""
    patched = model.clone()
    patched.add_object_patch("diffusion_model.final_layer.forward", lambda *args: torch.zeros(()))
    patched.patch_model(load_weights=False)
    patched.unpatch_model(unpatch_weights=False)
    assert "forward" in model.model.diffusion_model.final_layer.__dict__
    try:
        high, _ = set_quality(model, "high")
        first = render(high)
        assert not torch.equal(first, render(model)) and torch.equal(render(high), first)
    finally:
        del model.model.diffusion_model.final_layer.__dict__["forward"]


def test_under_torch_compile_nothing_is_mounted(model: ModelPatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """core's compile wrapper has a key of its own; here it stands for one that would compile."""
    mounted: list[int] = []
    monkeypatch.setattr(ideogram4_fusion.fusion.fusion.Fusion, "run", lambda *args, **named: mounted.append(1))
    compiled = set_quality(model, "high")[0].clone()
    compiled.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "torch.compile", lambda executor, *a, **n: executor(*a, **n))
    assert torch.equal(render(compiled), render(model)) and not mounted
