"""SGDOL under differential privacy: the step size is learned from the released gradients, at no cost in privacy.

``PrivateSGDOL`` is one line after Opacus' ``make_private``; ``LocalSGDOL`` is the server of the paper's own setting, in
which every user sends one noised gradient. Needs the extra ``private``. Privacy: docs/explanation/private.md.

>>> import torch
>>> from opacus import PrivacyEngine
>>> from sgdol.private import PrivateSGDOL
>>> model = torch.nn.Linear(3, 2)
>>> data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randint(2, (64,)))
>>> engine = PrivacyEngine(accountant="rdp")
>>> model, optimizer, loader = engine.make_private(
...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=2.0),
...     data_loader=torch.utils.data.DataLoader(data, batch_size=16), noise_multiplier=1.0, max_grad_norm=1.0,
... )
>>> optimizer = PrivateSGDOL(optimizer)  # the one line that learns the step size
>>> for inputs, targets in loader:
...     torch.nn.functional.cross_entropy(model(inputs), targets).backward()
...     optimizer.step(); optimizer.zero_grad()
>>> 0 <= float(optimizer.param_groups[0]["step_size"]) <= 4.0
True
"""

# ruff: noqa: E402  # what is missing is said before anything needs it
from __future__ import annotations

from sgdol._extras import require

require("sgdol.private", "private", "torch", "opacus")

from sgdol.private._local import LocalSGDOL, local_epsilon, randomize
from sgdol.private._optimizer import SOURCES, PrivateSGDOL

__all__ = ["SOURCES", "LocalSGDOL", "PrivateSGDOL", "local_epsilon", "randomize"]
