"""The thirteen text taps, on core's own Qwen3-VL classes at a small size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import comfy.sd
import comfy.text_encoders.ideogram4
import comfy.text_encoders.llama as llama
import pytest
import torch
from comfy import sd1_clip, supported_models_base
from ideogram4_fusion.hosts.comfyui.text_encoder import NoTextEncoder, with_raw_taps

HIDDEN, TAPS = 64, 13
TOKENS = {"qwen3vl_8b": [[(token, 1.0) for token in (3, 14, 15, 92, 65)]]}


def make_clip(final_norm: bool) -> comfy.sd.CLIP:
    """Ideogram 4's text encoder as core builds it, 36 layers of 64; `final_norm` as with the vision tower."""

    @dataclass
    class Config(llama.Qwen3VL_8BConfig):  # type: ignore[misc]
        vocab_size: int = 100
        hidden_size: int = HIDDEN
        intermediate_size: int = 96
        num_attention_heads: int = 4
        num_key_value_heads: int = 2
        lm_head: bool = False

    Config.head_dim, Config.rope_dims, Config.final_norm = 16, [4, 2, 2], final_norm

    class Language(llama.BaseLlama, llama.BaseQwen3, torch.nn.Module):  # type: ignore[misc]
        def __init__(self, _: Any, dtype: Any, device: Any, operations: Any) -> None:
            super().__init__()
            config = Config(final_norm=final_norm)
            self.num_layers, self.dtype = config.num_hidden_layers, dtype
            self.model = llama.Llama2_(config, device=device, dtype=dtype, ops=operations)

    class Encoder(sd1_clip.SDClipModel):  # type: ignore[misc]
        def __init__(self, device: Any = "cpu", dtype: Any = None, model_options: Any = None, **_: Any) -> None:
            super().__init__(
                device=device,
                dtype=dtype,
                layer=comfy.text_encoders.ideogram4.IDEOGRAM4_TAP_LAYERS,
                textmodel_json_config={},
                special_tokens={"pad": 0},
                layer_norm_hidden_state=False,
                enable_attention_masks=True,
                return_attention_masks=True,
                model_class=Language,
                model_options=model_options or {},
            )

    class TextEncoder(comfy.text_encoders.ideogram4.Ideogram4TEModel):  # type: ignore[misc]
        def __init__(self, device: Any = "cpu", dtype: Any = None, model_options: Any = None) -> None:
            sd1_clip.SD1ClipModel.__init__(
                self,
                device=device,
                dtype=dtype,
                name="qwen3vl_8b",
                clip_model=Encoder,
                model_options=model_options or {},
            )

    target = supported_models_base.ClipTarget(lambda **_: None, TextEncoder)
    clip = comfy.sd.CLIP(target, model_options={"dtype": torch.float32})
    generator = torch.Generator().manual_seed(0)
    for name, parameter in clip.cond_stage_model.named_parameters():
        if not parameter.ndim:
            continue
        size = parameter.shape[-1] ** -0.5
        values = torch.randn(parameter.shape, generator=generator) * size
        parameter.data.copy_(1 + values if "norm" in name else values)
    return clip


def features(clip: comfy.sd.CLIP) -> torch.Tensor:
    """[tokens, hidden, taps]; in a feature the tap's number runs fastest."""
    encoded: torch.Tensor = clip.encode_from_tokens(TOKENS)
    return encoded[0].unflatten(-1, (HIDDEN, TAPS)).float().cpu()


def raw_last(clip: comfy.sd.CLIP) -> torch.Tensor:
    """What leaves the last layer, seen from outside."""
    seen: list[torch.Tensor] = []
    layer = clip.cond_stage_model.qwen3vl_8b.transformer.model.layers[-1]
    stock = layer.forward

    def forward(*args: Any, **named: Any) -> Any:
        out = stock(*args, **named)
        seen.append((out[0] if isinstance(out, tuple) else out)[0].float().cpu())
        return out

    layer.forward = forward
    try:
        features(clip)
    finally:
        layer.forward = stock
    return seen[-1]


def test_a_normed_last_tap_is_taken_raw(inference: None) -> None:
    clip = make_clip(final_norm=True)
    before, raw = features(clip), raw_last(clip)
    assert not torch.allclose(before[..., -1], raw, rtol=1e-3, atol=1e-3)
    fixed, line = with_raw_taps(clip)
    after = features(fixed)
    torch.testing.assert_close(after[..., -1], raw)
    assert torch.equal(after[..., :-1], before[..., :-1])
    assert "came out normed" in line


def test_the_clip_itself_is_left_as_it_is(inference: None) -> None:
    clip = make_clip(final_norm=True)
    before = features(clip)
    fixed, _ = with_raw_taps(clip)
    for _ in range(2):
        features(fixed)
        assert torch.equal(features(clip), before)
        assert clip.cond_stage_model.qwen3vl_8b.transformer.model.norm is not None


def test_where_core_is_right_nothing_is_done(inference: None) -> None:
    clip = make_clip(final_norm=False)
    same, line = with_raw_taps(clip)
    assert same is clip and "nothing to do" in line
    torch.testing.assert_close(features(clip)[..., -1], raw_last(clip))


def test_twice_is_once(inference: None) -> None:
    fixed, _ = with_raw_taps(make_clip(final_norm=True))
    again, line = with_raw_taps(fixed)
    assert again is fixed and "nothing to do" in line


def test_a_lora_on_the_norm_and_a_saved_encoder_keep_their_norm(inference: None) -> None:
    """The norm's weight stays where it is: only its forward is passed over."""
    clip = make_clip(final_norm=True)
    name = "qwen3vl_8b.transformer.model.norm.weight"
    before = features(clip)
    patched = clip.clone()
    assert patched.add_patches({name: ("diff", (torch.ones(HIDDEN),))}, 1.0) == [name]
    normed = features(patched)
    assert not torch.equal(normed, before)
    fixed, _ = with_raw_taps(patched)
    torch.testing.assert_close(features(fixed)[..., -1], raw_last(clip))
    assert name in fixed.patcher.model.state_dict()
    assert torch.equal(features(patched), normed) and torch.equal(features(clip), before)


def test_an_encoder_that_another_model_taps_is_refused() -> None:
    clip = make_clip(final_norm=True)
    clip.cond_stage_model.qwen3vl_8b.layer = [1, 2]
    with pytest.raises(NoTextEncoder, match="type ideogram4"):
        with_raw_taps(clip)


def test_another_text_encoder_is_refused() -> None:
    clip = make_clip(final_norm=True)
    del clip.cond_stage_model.qwen3vl_8b
    with pytest.raises(NoTextEncoder, match="type ideogram4"):
        with_raw_taps(clip)
