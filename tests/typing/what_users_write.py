"""A program as users write it: type checkers have to see every public name in it."""

from typing import Any, assert_type

import jax.numpy as jnp
import torch
from torch import Tensor

import sgdol
from sgdol import SGDOL, SGDOLFree
from sgdol.jax import averaged_params, diagnostics, microbatch_grads, sgdol_free
from sgdol.jax import sgdol as sgdol_for_optax
from sgdol.learners import FTRL, MeasuredCurvature
from sgdol.metrics import RMS
from sgdol.torch import Log, averaged_weights, backward, polynomial_average, random_iterate, scalars

model = torch.nn.Linear(3, 1)
x, y = torch.ones(4, 3), torch.ones(4, 1)


def loss_fn(inputs: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.mse_loss(model(inputs), targets)


opt = SGDOL(model.parameters(), lr=0.1, momentum=0.9, averaging=8, learner=MeasuredCurvature(), metric=RMS())
also = SGDOL([{"params": model.parameters(), "lr": 0.1}], granularity="tensor", metric="rms")
papers = SGDOL(model.parameters(), smoothness=10.0, learner=FTRL(), alpha=10.0, estimator="paper")
shorter = SGDOL(model.parameters(), smoothness=10.0, **sgdol.PAPER)
loss = assert_type(backward(loss_fn, x, y, parts=2), Tensor)
opt.step()
opt.zero_grad()
pending = assert_type(opt.pending, bool)
numbers = assert_type(opt.diagnostics(), dict[str, Any])
with opt.averaged():
    model(x)
saved = opt.averaged_state_dict(model)
log = Log(every=10)
log(opt)
scalars(opt)

free = SGDOLFree(model.parameters(), momentum=0.9)


def closure() -> Tensor:
    free.zero_grad()
    return backward(loss_fn, x, y)


free.step(closure)
with free.averaged():
    model(x)

average = torch.optim.swa_utils.AveragedModel(model, avg_fn=polynomial_average(8))
chosen = torch.optim.swa_utils.AveragedModel(model, avg_fn=random_iterate(0))
with averaged_weights(model, average):
    model(x)

transformation = sgdol_for_optax(learning_rate=0.1, momentum=0.9)
params = jnp.zeros(2)
state = transformation.init(params)
grads = microbatch_grads(lambda p, a: jnp.sum(p * a), 2)(params, jnp.ones((4, 2)))
updates, state = transformation.update(grads, state, params)
print(diagnostics(state), sgdol_free(), averaged_params)
