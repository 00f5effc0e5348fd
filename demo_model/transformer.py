"""The transformer: diffusers' Ideogram 4 with six blocks, trained by flow matching through its own fp8 rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import Ideogram4Transformer2DModel
from diffusers.models.transformers.transformer_ideogram4 import (
    IMAGE_POSITION_OFFSET,
    LLM_TOKEN_INDICATOR,
    OUTPUT_IMAGE_INDICATOR,
    SEQUENCE_PADDING_INDICATOR,
    Ideogram4EmbedScalar,
    _sinusoidal_embedding,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ..checkpoint.convert import E4M3_MAX
from ..checkpoint.dimensions import Dimensions
from ..hosts.diffusers.load import replace_norms
from .autoencoder import TOKEN
from .budget import Budget, set_rate
from .text_encoder import FEATURES

DIMENSIONS = Dimensions(
    in_channels=TOKEN,
    num_layers=6,
    num_attention_heads=6,
    attention_head_dim=64,
    intermediate_size=1024,
    adaln_dim=128,
    llm_features_dim=FEATURES,
    # The official 5,000,000 leaves three frequencies that differ within a picture of 16 x 16 tokens; this leaves six.
    rope_theta=10_000,
    mrope_section=(12, 10, 10),
    norm_eps=1e-5,
)

_GATE = 0.25  # of every branch at the start, before tanh
# Noise levels are drawn as the presets space them, but with more of them near noise, where the layout is decided.
_LEVEL_MEAN, _LEVEL_STD = 0.5, 1.75
_PEAK_RATE = 1e-3
_EMA = 0.999
_REPORT_EVERY = 200  # steps


@dataclass(frozen=True)
class Examples:
    """What the transformer is trained on, all on one device.

    Attributes:
        features: [N, text, FEATURES] bfloat16, padded on the left.
        lengths: [N] int64, text tokens that are no padding.
        latents: [N, image, 128] bfloat16, normalised.
        weights: [N, image] bfloat16, of a token's error; 1 on average.
    """

    features: Tensor
    lengths: Tensor
    latents: Tensor
    weights: Tensor


def new_transformer() -> Ideogram4Transformer2DModel:
    """Untrained, float32, with the norms that it is run with; its weights come from torch's global generator."""
    model = Ideogram4Transformer2DModel(**DIMENSIONS.as_config())
    replace_norms(model)
    model.t_embedding = _ExactTime(DIMENSIONS.hidden_size, input_range=(0.0, 1.0))
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.ones_(weight)
        elif weight.ndim < 2:
            nn.init.zeros_(weight)
        elif "adaln_modulation" in name:
            nn.init.normal_(weight, std=0.01)
        else:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    nn.init.normal_(model.embed_image_indicator.weight, std=0.02)
    nn.init.zeros_(model.final_layer.linear.weight)
    for block in model.layers:
        _, gate_attention, _, gate_mlp = block.adaln_modulation.bias.data.chunk(4)
        gate_attention.fill_(_GATE)
        gate_mlp.fill_(_GATE)
    return model


def train_transformer(
    model: Ideogram4Transformer2DModel, examples: Examples, end: float, batch: int
) -> Iterator[dict[str, float]]:
    """Trains it in place until the clock, `time.perf_counter`, reads `end`, then gives it its weights' moving average.

    Yields, every 200 steps and at the end: step, seconds and loss, the mean over those steps.
    """
    device = examples.features.device
    # A CPU's backward in bfloat16 is a hundred times slower.
    velocity: Any = Velocity(model, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if device.type == "cuda":
        velocity = torch.compile(velocity, dynamic=False)
    parameters = list(model.parameters())
    optimiser = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda")
    average = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator(device).manual_seed(2)
    _loss(velocity, examples, batch, generator).backward()  # compiles
    budget = Budget(end, _PEAK_RATE)
    total, counted = torch.zeros((), device=device), 0
    while (rate := budget.next_rate()) is not None:
        set_rate(optimiser, rate)
        optimiser.zero_grad()
        loss = _loss(velocity, examples, batch, generator)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1.0 - min(_EMA, budget.step / (budget.step + 10)))
        total, counted = total + loss.detach(), counted + 1
        if budget.step % _REPORT_EVERY == 0:
            yield {"step": budget.step, "seconds": budget.spent, "loss": total.item() / counted}
            total, counted = torch.zeros((), device=device), 0
    yield {"step": budget.step, "seconds": budget.spent, "loss": total.item() / max(counted, 1)}
    with torch.no_grad():
        torch._foreach_copy_(parameters, average)


def _loss(velocity: nn.Module, examples: Examples, batch: int, generator: torch.Generator) -> Tensor:
    """Flow matching: the velocity from noise to data at a random point between them, squared error.

    Source: Lipman et al., Flow Matching for Generative Modeling; time 0 is noise, as in the model.
    """
    device = examples.features.device
    some = torch.randint(len(examples.features), (batch,), generator=generator, device=device)
    data = examples.latents[some].float()
    noise = torch.randn(data.shape, generator=generator, device=device)
    draws = torch.randn(batch, generator=generator, device=device)
    time = torch.sigmoid(-(_LEVEL_MEAN + _LEVEL_STD * draws))
    between = torch.lerp(noise, data, time[:, None, None])
    found: Tensor = velocity(between, time, examples.features[some], examples.lengths[some])
    error = (found.float() - (data - noise)).square().mean(-1)
    return (error * examples.weights[some].float()).mean()


class Velocity(nn.Module):
    """The model as it will be run: in one dtype, its Linears' weights rounded row by row to fp8.

    The rounding is part of the forward, and its gradient that of the identity, so training makes up for it. Source:
    Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons (straight-through estimator).
    """

    def __init__(self, model: Ideogram4Transformer2DModel, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        modules = model.named_modules()
        self.linears = frozenset(f"{name}.weight" for name, module in modules if isinstance(module, nn.Linear))

    def forward(self, between: Tensor, time: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """Velocities [N, image, 128].

        Args:
            between: [N, image, 128], float32.
            time: [N] float32; 0 is noise.
            features: [N, text, FEATURES] bfloat16.
            lengths: [N] text tokens that are no padding.
        """
        weights = {
            name: (rounded(weight) if name in self.linears else weight).to(self.dtype)
            for name, weight in self.model.named_parameters()
        }
        text = features.shape[1]
        positions, segments, indicator = layout(lengths, text, round(between.shape[1] ** 0.5))
        inputs = {
            "hidden_states": functional.pad(between.to(self.dtype), (0, 0, text, 0)),
            "timestep": time,
            "encoder_hidden_states": functional.pad(features.to(self.dtype), (0, 0, 0, between.shape[1])),
            "position_ids": positions,
            "segment_ids": segments,
            "indicator": indicator,
            "return_dict": False,
        }
        out: Tensor = functional_call(self.model, weights, (), inputs)[0]
        return out[:, text:]


class _ExactTime(Ideogram4EmbedScalar):
    """Embeds a float32 time in a bfloat16 model, as ComfyUI does; diffusers' rounded times are among these."""

    def forward(self, x: Tensor) -> Tensor:
        waves = _sinusoidal_embedding(1e4 * x, self.dim).to(self.mlp_in.weight.dtype)
        embedded: Tensor = self.mlp_out(functional.silu(self.mlp_in(waves)))
        return embedded


def rounded(weight: Tensor) -> Tensor:
    """What the row-wise fp8 of a weight [O, I] is dequantised to, in bfloat16; its gradient is the identity's."""
    plain = weight.bfloat16()
    with torch.no_grad():
        scale = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / E4M3_MAX
        stored = (weight / scale[:, None]).to(torch.float8_e4m3fn)
        off = stored.bfloat16() * scale.bfloat16()[:, None] - plain
    return plain + off


def layout(lengths: Tensor, text: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """`Ideogram4Pipeline._prepare_ids` without a loop, for pictures of `side` x `side` tokens.

    Returns positions [N, text + image, 3], segments and indicator [N, text + image], all int64.
    """
    device = lengths.device
    places = torch.arange(text, device=device)[None] - (text - lengths[:, None])
    there = places >= 0
    image = side * side
    cells = torch.arange(image, device=device)
    grid = torch.stack([torch.zeros_like(cells), cells // side, cells % side], 1) + IMAGE_POSITION_OFFSET
    positions = torch.cat([places.clamp(min=0)[:, :, None].expand(-1, -1, 3), grid.expand(len(lengths), -1, -1)], dim=1)
    segments = functional.pad(torch.where(there, 1, SEQUENCE_PADDING_INDICATOR), (0, image), value=1)
    indicator = functional.pad(there * LLM_TOKEN_INDICATOR, (0, image), value=OUTPUT_IMAGE_INDICATOR)
    return positions, segments, indicator
