"""Peers that are made of two optimizers of torch.optim."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MuonAdamW", "mark_outer_layers"]

OUTER = ("embedding", "position", "head")
"""Parts of the names of parameters that are no hidden layer's."""


def mark_outer_layers(module: nn.Module) -> None:
    """Set ``outer_layer`` on each parameter: True in embeddings, tables of positions and heads."""
    for name, p in module.named_parameters():
        p.outer_layer = not set(OUTER).isdisjoint(name.split("."))  # type: ignore[attr-defined]


class MuonAdamW(torch.optim.Optimizer):
    """torch.optim.Muon for the matrices of hidden layers, AdamW for everything else, as Muon's authors recommend.

    A convolution is a matrix of output channels x the rest. One learning rate serves both: Muon's steps are scaled to
    the root mean square of AdamW's (``adjust_lr_fn="match_rms_adamw"``).
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, momentum: float = 0.95) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.hidden = [p for p in params if p.ndim >= 2 and not getattr(p, "outer_layer", False)]
        mine = {id(p) for p in self.hidden}
        others = [p for p in params if id(p) not in mine]
        # Muon takes matrices only: each shares its memory with the parameter.
        self.matrices = [nn.Parameter(p.detach().view(len(p), -1)) for p in self.hidden]
        self.parts: list[torch.optim.Optimizer] = []
        if self.matrices:
            options: dict[str, Any] = {"momentum": momentum, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
            self.parts.append(torch.optim.Muon(self.matrices, lr=lr, **options))
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=lr, weight_decay=0.0))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """With the gradients of the parameters, and the learning rate of the first group."""
        for matrix, p in zip(self.matrices, self.hidden, strict=True):
            matrix.grad = None if p.grad is None else p.grad.view(len(p), -1)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            part.step()
