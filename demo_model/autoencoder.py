"""The VAE: the FLUX.2 autoencoder at small widths, trained on the posters, and latents as the transformer sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2
from torch import Tensor, nn
from torch.func import functional_call

from .budget import Budget, set_rate
from .drawing import draw, error_weights

CHANNELS = 32  # of a latent pixel; a token holds 2 x 2 of them
TOKEN = 4 * CHANNELS

# Multiples of the first, under norms of 32 groups: what ComfyUI's VAE classes can be built with. A group needs two
# channels at least: of one alone, a norm takes away its mean over the picture, and so the background's colour.
_WIDTHS = (64, 64, 64, 64)
_NOISE = 0.25  # at most, on latents of variance 1: the decoder learns to overlook what sampling leaves
_PEAK_RATE = 2e-3
_REPORT_EVERY = 200  # steps


def new_autoencoder() -> AutoencoderKLFlux2:
    """Untrained, from torch's global generator."""
    return AutoencoderKLFlux2(block_out_channels=_WIDTHS, norm_num_groups=32, layers_per_block=1)


def train_autoencoder(
    autoencoder: AutoencoderKLFlux2, rows: Tensor, end: float, batch: int
) -> Iterator[dict[str, float]]:
    """Trains it in place until the clock, `time.perf_counter`, reads `end`.

    Args:
        autoencoder: float32, on the device of `rows`.
        rows: posters to draw from, as `drawing.as_rows` gives them.
        end: when to stop, compilation on a GPU included.
        batch: posters a step.

    Yields, every 200 steps and at the end: step, seconds, and PSNR in dB of a batch through noisy latents.
    """
    device = rows.device
    reconstruction: Any = _Reconstruction(autoencoder)
    if device.type == "cuda":
        reconstruction = torch.compile(reconstruction, dynamic=False)
    optimiser = torch.optim.AdamW(
        autoencoder.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
    )
    generator = torch.Generator(device).manual_seed(1)
    _loss(reconstruction, rows, batch, generator)[0].backward()  # compiles
    budget = Budget(end, _PEAK_RATE)
    mean_error = torch.zeros((), device=device)
    while (rate := budget.next_rate()) is not None:
        set_rate(optimiser, rate)
        optimiser.zero_grad()
        loss, mean_error = _loss(reconstruction, rows, batch, generator)
        loss.backward()
        nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
        optimiser.step()
        if budget.step % _REPORT_EVERY == 0:
            yield _report(budget, mean_error)
    yield _report(budget, mean_error)


def _loss(reconstruction: nn.Module, rows: Tensor, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The loss over some of the posters, and their mean squared error."""
    device = rows.device
    some = rows[torch.randint(len(rows), (batch,), generator=generator, device=device)]
    picture = draw(some)
    level = _NOISE * torch.rand(batch, 1, 1, generator=generator, device=device)
    noise = level * torch.randn(batch, (picture.shape[2] // 16) ** 2, TOKEN, generator=generator, device=device)
    error = reconstruction(picture, noise).float() - picture
    weight = error_weights(some)[:, None]
    edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
    loss = (weight * (error.abs() + error.square())).mean() + edges
    return loss, error.detach().square().mean()


@torch.no_grad()
def measure_latents(autoencoder: AutoencoderKLFlux2, rows: Tensor, batch: int = 64) -> None:
    """Puts mean and variance of each channel of a token into `autoencoder.bn`, over the posters of `rows`.

    The order is that of the official folder, which diffusers applies to tokens: row of the patch, column, channel.
    """
    tokens = torch.cat([_tokens(_means(autoencoder, draw(part))).float().flatten(0, 1) for part in rows.split(batch)])
    autoencoder.bn.running_mean.copy_(tokens.mean(0))
    autoencoder.bn.running_var.copy_(tokens.var(0))


@torch.no_grad()
def latents(autoencoder: AutoencoderKLFlux2, picture: Tensor) -> Tensor:
    """[N, 3, H, W] in -1..1 -> tokens [N, H/16 * W/16, 128] float32, normalised as `Ideogram4Pipeline` undoes it."""
    bn = autoencoder.bn
    deviation = torch.sqrt(bn.running_var + autoencoder.config.batch_norm_eps).float()
    return (_tokens(_means(autoencoder, picture)).float() - bn.running_mean.float()) / deviation


class _Reconstruction(nn.Module):
    """Encodes, adds noise to the latents and decodes, in bfloat16 as the VAE is run; gradients reach its weights."""

    def __init__(self, autoencoder: AutoencoderKLFlux2) -> None:
        super().__init__()
        self.autoencoder = _EncodeDecode(autoencoder)

    def forward(self, picture: Tensor, noise: Tensor) -> Tensor:
        """[N, 3, H, W] in -1..1 and noise [N, H/16 * W/16, 128] -> the picture again."""
        weights = {name: _computed(weight) for name, weight in self.autoencoder.named_parameters()}
        drawn: Tensor = functional_call(self.autoencoder, weights, (_computed(picture), noise))
        return drawn


class _EncodeDecode(nn.Module):
    def __init__(self, autoencoder: AutoencoderKLFlux2) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, picture: Tensor, noise: Tensor) -> Tensor:
        means = _means(self.autoencoder, picture)
        # In units of each channel's deviation, so that larger latents do not evade the noise.
        deviation = _tokens(means).float().std((0, 1))
        noisy = means + _pixels(noise * deviation, means.shape[2]).to(means.dtype)
        drawn: Tensor = self.autoencoder.decoder(self.autoencoder.post_quant_conv(noisy))
        return drawn


def _means(autoencoder: AutoencoderKLFlux2, picture: Tensor) -> Tensor:
    """The latents' means [N, 32, H/8, W/8]; the variances beside them are not trained."""
    weight = autoencoder.quant_conv.weight
    means: Tensor = autoencoder.quant_conv(autoencoder.encoder(picture.to(weight.dtype))).chunk(2, dim=1)[0]
    return means


def _tokens(means: Tensor) -> Tensor:
    """[N, 32, 2 h, 2 w] -> [N, h w, 128], a token's values in the order row, column, channel."""
    patches = means.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def _pixels(tokens: Tensor, height: int) -> Tensor:
    """The reverse of `_tokens`, for latents of that height."""
    patches = tokens.unflatten(2, (2, 2, CHANNELS)).unflatten(1, (height // 2, -1))
    return patches.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def _computed(tensor: Tensor) -> Tensor:
    """bfloat16 on a GPU, with pictures and kernels in the order that is fastest there; on a CPU float32 as it is."""
    if tensor.device.type != "cuda":
        return tensor
    if tensor.ndim == 4:
        return tensor.to(torch.bfloat16, memory_format=torch.channels_last)
    return tensor.to(torch.bfloat16)


def _report(budget: Budget, mean_squared_error: Tensor) -> dict[str, float]:
    psnr = -10.0 * torch.log10(mean_squared_error / 4.0)  # of values that span 2
    return {"step": budget.step, "seconds": budget.spent, "psnr_db": psnr.item()}
