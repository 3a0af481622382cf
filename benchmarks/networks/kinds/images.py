"""Images: a ResNet with BatchNorm, a vision transformer, an MLP-Mixer that tells rotations, and SimCLR."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality import data
from benchmarks.quality.data import Samples
from benchmarks.quality.networks import ResNet, TransformerLayer
from benchmarks.quality.objectives import Classifier, Finite, Objective

__all__ = ["mixer", "resnet", "simclr", "vit"]


# Augmented images -----------------------------------------------------------------------------------------------------


def crops(images: Tensor, codes: Tensor, size: int) -> Tensor:
    """A square of ``size`` pixels of each image, given as a row; the code numbers its place."""
    side = round(images.shape[1] ** 0.5)
    places = side - size + 1
    squares = images.view(-1, side, side).unfold(1, size, 1).unfold(2, size, 1)
    codes = codes % places**2
    return squares[torch.arange(len(images)), codes // places, codes % places].flatten(1)


class Augmented(Classifier):
    """Cross-entropy on random crops; xi is pairs of a sample's number and a code of its crop.

    With ``rotations`` the crop is turned by a random quarter, and which one it was is the class.
    """

    def __init__(self, network: nn.Module, samples: Samples, batch: int, size: int, rotations: bool = False) -> None:
        super().__init__(network, samples, batch)
        self.size, self.rotations = size, rotations
        codes = torch.randint(2**16, (self.rows,), generator=torch.Generator().manual_seed(13))
        self.everything = torch.stack([self.everything, codes], 1)

    def draw(self, generator: torch.Generator, steps: int) -> Tensor:
        rows = super().draw(generator, steps)
        return torch.stack([rows, torch.randint(2**16, rows.shape, generator=generator)], -1)

    def forward(self, rows: Tensor) -> Tensor:
        inputs, targets = self.batch_of(rows)
        return F.cross_entropy(self.logits(inputs), targets)

    def batch_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Crops and classes."""
        numbers, codes = rows.unbind(1)
        images, targets = crops(self.samples.inputs[numbers], codes // 4, self.size), self.samples.targets[numbers]
        if not self.rotations:
            return images, targets
        squares = images.view(-1, self.size, self.size)
        turned = torch.stack([squares.rot90(k, (1, 2)) for k in range(4)])
        return turned[codes % 4, torch.arange(len(codes))].flatten(1), codes % 4


def resnet(seed: int, part: str, size: int, channels: tuple[int, ...], batch: int) -> Objective:
    """A ResNet with BatchNorm on crops of MNIST at 14 x 14."""
    return Augmented(ResNet(size, channels), data.mnist(part, size=14), batch, size)


class Patches(nn.Module):
    """Square patches of images given as rows, each through the same linear layer."""

    def __init__(self, size: int, patch: int, width: int) -> None:
        super().__init__()
        self.size, self.patch, self.embedding = size, patch, nn.Linear(patch * patch, width)

    def forward(self, x: Tensor) -> Tensor:
        side = self.size // self.patch
        x = x.view(-1, side, self.patch, side, self.patch).transpose(2, 3)
        return self.embedding(x.reshape(len(x), side * side, -1))


class VisionTransformer(nn.Module):
    """Patches with learned positions, transformer layers, and a classifier of their mean."""

    def __init__(self, size: int, patch: int, width: int, layers: int, classes: int = 10) -> None:
        super().__init__()
        self.patches = Patches(size, patch, width)
        self.position = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.layers = nn.ModuleList(TransformerLayer(width, width // 32, 0.0) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x) + self.position
        for layer in self.layers:
            x = layer(x, torch.zeros(()))
        return self.head(self.norm(x).mean(1))


def vit(seed: int, part: str, size: int, patch: int, width: int, layers: int, batch: int) -> Objective:
    """A vision transformer on crops of MNIST at 28 x 28."""
    network = VisionTransformer(size, patch, width, layers)
    return Augmented(network, data.mnist(part), batch, size)


class MixerLayer(nn.Module):
    """Two linear layers over the patches, then two over the channels, each with a connection around them."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.along = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).mT).mT
        return x + self.along(self.norm2(x))


class Mixer(nn.Sequential):
    """An MLP-Mixer."""

    def __init__(self, size: int, patch: int, width: int, layers: int, classes: int) -> None:
        patches = (size // patch) ** 2
        body = [MixerLayer(patches, width) for _ in range(layers)]
        super().__init__(Patches(size, patch, width), *body, nn.LayerNorm(width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for name, module in self.named_children():
            x = module(x.mean(1)) if name == "head" else module(x)
        return x


def mixer(seed: int, part: str, size: int, patch: int, width: int, layers: int, batch: int) -> Objective:
    """An MLP-Mixer that tells by which quarter turn a crop of MNIST at 28 x 28 was rotated."""
    return Augmented(Mixer(size, patch, width, layers, 4), data.mnist(part), batch, size, rotations=True)


# Contrastive ----------------------------------------------------------------------------------------------------------


class SimCLR(Finite):
    """NT-Xent: each of two crops of an image is to find the other among all crops of its batch.

    xi is a sample's number and the codes of both crops. A batch in two parts has fewer crops to choose from, as with
    any contrastive loss in microbatches; evaluations use whole batches.
    """

    def __init__(self, network: nn.Module, samples: Samples, batch: int, size: int, temperature: float) -> None:
        super().__init__(len(samples.targets), batch)
        self.network, self.samples, self.size, self.temperature = network, samples, size, temperature
        codes = torch.randint(2**16, (self.rows, 2), generator=torch.Generator().manual_seed(14))
        self.everything = torch.cat([self.everything[:, None], codes], 1)

    def draw(self, generator: torch.Generator, steps: int) -> Tensor:
        rows = super().draw(generator, steps)
        codes = torch.randint(2**16, (*rows.shape, 2), generator=generator)
        return torch.cat([rows[..., None], codes], -1)

    def forward(self, rows: Tensor) -> Tensor:
        images = self.samples.inputs[rows[:, 0]]
        views = torch.cat([crops(images, rows[:, 1], self.size), crops(images, rows[:, 2], self.size)])
        codes = F.normalize(self.network(views))
        likeness = codes @ codes.T / self.temperature
        likeness = likeness.masked_fill(torch.eye(len(codes), dtype=torch.bool), -1e9)
        return F.cross_entropy(likeness, torch.arange(len(codes)).roll(len(rows)))

    def full(self) -> Tensor:
        return torch.stack([self(rows) for rows in self.everything.split(self.batch)]).mean()


class Encoder(nn.Sequential):
    """Convolutions, and two linear layers to a short code."""

    def __init__(self, size: int, channels: tuple[int, int], hidden: int, code: int) -> None:
        first, second = channels
        super().__init__(
            nn.Unflatten(1, (1, size, size)),
            nn.Conv2d(1, first, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(second * (size // 4) ** 2, hidden),
            nn.ReLU(),
        )
        self.head = nn.Linear(hidden, code)


def simclr(
    seed: int, part: str, size: int, channels: tuple[int, int], hidden: int, temperature: float, batch: int
) -> Objective:
    """SimCLR on crops of MNIST at 14 x 14."""
    return SimCLR(Encoder(size, channels, hidden, 64), data.mnist(part, size=14), batch, size, temperature)
