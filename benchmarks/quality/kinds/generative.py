"""Networks that describe their data: autoencoders, a denoiser, densities."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality import data
from benchmarks.quality.data import Samples
from benchmarks.quality.networks import MLP
from benchmarks.quality.objectives import Evaluation, Finite, Objective, Supervised

__all__ = ["Noised", "autoencoder", "denoiser", "flow", "mixture_density", "vae"]


# With noise of their own ----------------------------------------------------------------------------------------------


class _Noised(Finite):
    """The mean over samples and over the rows of a fixed bank of Gaussian noise; xi is pairs of their numbers.

    So a batch is the same function when it is looked at again, and f is a finite mean: ``full`` pairs sample i with row
    i of the bank.
    """

    def __init__(self, samples: Samples, batch: int, dimension: int) -> None:
        super().__init__(len(samples.targets), batch)
        self.samples = samples
        self.bank = torch.randn(self.rows, dimension, generator=torch.Generator().manual_seed(12))
        self.everything = torch.stack([self.everything, self.everything], 1)

    def draw(self, generator: torch.Generator, steps: int) -> Tensor:
        rows = super().draw(generator, steps)
        return torch.stack([rows, torch.randint(len(self.bank), rows.shape, generator=generator)], -1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.loss(self.samples.inputs[rows[:, 0]], self.bank[rows[:, 1]])

    def loss(self, x: Tensor, noise: Tensor) -> Tensor:
        """The mean loss of inputs, each with its noise."""
        raise NotImplementedError

    def evaluate(self) -> Evaluation:
        with torch.no_grad():
            kept = self.samples.test_inputs
            return Evaluation(float(self.full()), validation=float(self.loss(kept, self.bank[: len(kept)])))


Noised = _Noised  # under a public name; its own is a part of what names saved runs


class VAE(_Noised):
    """Minus the evidence's lower bound per pixel, for pixels in [0, 1] as Bernoulli means.

    Its gap is over the pixels' own entropy, below which no decoder comes.
    """

    def __init__(self, samples: Samples, batch: int, hidden: int, latent: int) -> None:
        super().__init__(samples, batch, latent)
        pixels = samples.inputs.shape[1]
        self.encoder = MLP((pixels, hidden, 2 * latent), nn.Tanh)
        self.decoder = MLP((latent, hidden, pixels), nn.Tanh)
        x, mean = samples.inputs, samples.inputs.mean(0)
        self.optimum = float((torch.special.entr(x) + torch.special.entr(1 - x)).mean())
        self.constant = float((torch.special.entr(mean) + torch.special.entr(1 - mean)).mean())

    def loss(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        logits = self.decoder(mean + torch.exp(log_variance / 2) * noise)
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum() / 2
        return F.binary_cross_entropy_with_logits(logits, x) + divergence / x.numel()


def vae(seed: int, part: str, hidden: int, latent: int, batch: int) -> Objective:
    """Of the digits."""
    return VAE(data.digits(part), batch, hidden, latent)


class Denoiser(_Noised):
    """The mean squared error of a network that is shown images with Gaussian noise."""

    def __init__(self, samples: Samples, batch: int, channels: int, sigma: float) -> None:
        super().__init__(samples, batch, samples.inputs.shape[1])
        self.sigma, side = sigma, math.isqrt(samples.inputs.shape[1])
        self.network = nn.Sequential(
            nn.Unflatten(1, (1, side, side)),
            nn.Conv2d(1, channels, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(channels, 1, 3, padding=1),
            nn.Flatten(),
        )
        self.constant = float(samples.inputs.var(0, correction=0).mean())

    def loss(self, x: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(self.network(x + self.sigma * noise), x)


def denoiser(seed: int, part: str, channels: int, sigma: float, batch: int) -> Objective:
    """Of MNIST at 14 x 14."""
    return Denoiser(data.mnist(part, size=14), batch, channels, sigma)


# Without --------------------------------------------------------------------------------------------------------------


class _Tied(nn.Module):
    """Layers, and the same weights transposed on the way back."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.there = MLP(widths, nn.Tanh)
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(w)) for w in reversed(widths[:-1])])

    def forward(self, x: Tensor) -> Tensor:
        code = self.there(x)
        layers = [m for m in self.there if isinstance(m, nn.Linear)]
        for layer, bias in zip(reversed(layers), self.biases, strict=True):
            code = torch.tanh(code) @ layer.weight + bias
        return code


def autoencoder(seed: int, source: str, part: str, widths: tuple[int, ...], tied: bool, batch: int) -> Objective:
    """The mean squared error of images that went through a narrow layer."""
    x = data.digits(part) if source == "digits" else data.mnist(part, size=14)
    pixels = x.inputs.shape[1]
    network = _Tied((pixels, *widths)) if tied else MLP((pixels, *widths, *widths[-2::-1], pixels), nn.Tanh)
    samples = Samples(x.inputs, x.inputs, x.test_inputs, x.test_inputs)
    return Supervised(network, samples, batch, F.mse_loss, float(x.inputs.var(0, correction=0).mean()))


BELOW = 0.05
"""What stands for f* of a density is this much, in nats, below the entropy of what the data were drawn from: a network
that is fitted to them comes a little below it."""


def _mixture_loss(outputs: Tensor, y: Tensor) -> Tensor:
    logits, means, log_scales = outputs.chunk(3, 1)
    z = (y - means) * torch.exp(-log_scales)
    logs = logits.log_softmax(1) - log_scales - z * z / 2 - math.log(2 * math.pi) / 2
    return -logs.logsumexp(1).mean()


def mixture_density(seed: int, hidden: int, components: int, batch: int, data_seed: int) -> Objective:
    """Minus the log likelihood of a mixture whose parameters a network computes; the data have two branches."""
    generator = torch.Generator().manual_seed(data_seed)
    x = 2 * torch.rand(2560, 1, generator=generator) - 1
    branch = (torch.rand(2560, 1, generator=generator) < 0.5).float()
    spread = 0.05 + 0.1 * x.abs()
    centre = torch.sin(3 * x)
    y = centre * (2 * branch - 1) + spread * torch.randn(2560, 1, generator=generator)
    truth = torch.hstack([torch.zeros(2560, 2), centre, -centre, spread.log(), spread.log()])
    samples = Samples(x[:2048], y[:2048], x[2048:], y[2048:])
    gaussian = float(samples.targets.var().log() / 2 + math.log(2 * math.pi) / 2 + 0.5)
    objective = Supervised(MLP((1, hidden, 3 * components), nn.Tanh), samples, batch, _mixture_loss, gaussian)
    objective.optimum = float(_mixture_loss(truth[:2048], samples.targets)) - BELOW
    return objective


class _Couplings(nn.Module):
    """Affine coupling layers on the plane (real NVP); the outputs are -log of the density."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP((1, hidden, 2), nn.Tanh) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x[:, :1], x[:, 1:]
        change = torch.zeros_like(a)
        for layer in self.layers:
            shift, log_scale = layer(a).chunk(2, 1)
            log_scale = torch.tanh(log_scale) * 2
            a, b = (b - shift) * torch.exp(-log_scale), a
            change = change + log_scale
        return (a * a + b * b) / 2 + change + math.log(2 * math.pi)


def flow(seed: int, layers: int, hidden: int, sigma: float, batch: int, data_seed: int) -> Objective:
    """A normalising flow for a banana: x_2 = x_1^2 and noise."""
    generator = torch.Generator().manual_seed(data_seed)
    z = torch.randn(2560, 2, generator=generator)
    x = torch.stack([z[:, 0], z[:, 0] ** 2 - 1 + sigma * z[:, 1]], 1)
    samples = Samples(x[:2048], x[:2048], x[2048:], x[2048:])

    def criterion(minus_log: Tensor, _: Tensor) -> Tensor:
        return minus_log.mean()

    gaussian = float(torch.logdet(samples.inputs.T.cov()) / 2 + math.log(2 * math.pi) + 1)
    objective = Supervised(_Couplings(layers, hidden), samples, batch, criterion, gaussian)
    truth = z[:2048].square().sum(1).mean() / 2 + math.log(2 * math.pi) + math.log(sigma)
    objective.optimum = float(truth) - BELOW
    return objective
