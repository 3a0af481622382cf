"""The PyTorch front end: the optimizer, averages of its iterates, and a log of what it learns."""

from sgdol.torch.averaging import averaged_weights, polynomial_average, random_iterate
from sgdol.torch.free import SGDOLFree
from sgdol.torch.log import Log, scalars
from sgdol.torch.optimizer import SGDOL

__all__ = ["SGDOL", "Log", "SGDOLFree", "averaged_weights", "polynomial_average", "random_iterate", "scalars"]
