"""The PyTorch front end: the optimizer and averages of its iterates."""

from sgdol.torch.averaging import averaged_weights, polynomial_average, random_iterate
from sgdol.torch.free import SGDOLFree
from sgdol.torch.optimizer import SGDOL

__all__ = ["SGDOL", "SGDOLFree", "averaged_weights", "polynomial_average", "random_iterate"]
