"""Training programs of the kinds that people have, with SGDOL swapped in."""

import warnings

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from sgdol import SGDOL
from sgdol.learners import FTRL


def discriminator_steps(together: bool, steps: int, apart: float = 2.0) -> tuple[float, float, SGDOL]:
    """A GAN's discriminator on points of two clouds, as DCGAN trains it: real and fake in two backward calls.

    Together, each half of the batch has both losses in one backward. Returns the loss before and after.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    opt = SGDOL(net.parameters(), lr=0.5, learner=FTRL(), momentum=0.0)

    def loss(points, label):
        return binary_cross_entropy_with_logits(net(points), torch.full((len(points), 1), label))

    def both(size):
        return torch.randn(size, 2) + apart, torch.randn(size, 2) - apart

    real, fake = both(500)
    before = (loss(real, 1.0) + loss(fake, 0.0)).item()
    for _ in range(steps):
        net.zero_grad()
        x, y = both(32)
        if together:
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                ((loss(a, 1.0) + loss(b, 0.0)) / 2).backward()
        else:
            loss(x, 1.0).backward()
            loss(y, 0.0).backward()
        opt.step()
    return before, (loss(real, 1.0) + loss(fake, 0.0)).item(), opt


def test_a_gan_with_two_losses_in_two_backward_calls_is_told_why_nothing_moves():
    with pytest.warns(UserWarning, match=r"exactly 0 for 10 updates.*GAN.*add the losses"):
        discriminator_steps(together=False, steps=60, apart=0.5)


def test_a_gan_that_adds_its_losses_trains_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before, after, _ = discriminator_steps(together=True, steps=60)
    assert after < before / 2  # the clouds hardly overlap: any step size near lr does far better


def test_a_language_model_loop_that_accumulates_and_clips_learns_without_a_word():
    """Letters that follow each other in a circle, one in five replaced: the loss goes from ln 8 = 2.1 to about 1.1."""
    torch.manual_seed(0)
    text = torch.where(torch.rand(4000) < 0.2, torch.randint(8, (4000,)), torch.arange(4000) % 8)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Linear(16, 8))
    opt = SGDOL(model.parameters(), lr=0.1)
    accumulation, losses = 4, []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(60):
            for _ in range(accumulation):
                starts = torch.randint(len(text) - 9, (4,))
                x = torch.stack([text[i : i + 8] for i in starts])
                y = torch.stack([text[i + 1 : i + 9] for i in starts])
                loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
                (loss / accumulation).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            losses.append(loss.item())
    assert opt.diagnostics()["gradients"] == accumulation
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


class Net:
    """As skorch does it: a step function that is the closure, called by the optimizer, and its loss kept outside."""

    def __init__(self, module: torch.nn.Module, opt: SGDOL) -> None:
        self.module, self.opt, self.losses = module, opt, []

    def train_step_single(self, x, y):
        loss = mse_loss(self.module(x), y)
        loss.backward()
        return loss

    def train_step(self, x, y):
        calls = []

        def closure():
            self.opt.zero_grad()
            calls.append(self.train_step_single(x, y))
            return calls[-1]

        self.opt.step(closure)
        self.losses.append(calls[0].item())
        return len(calls)


def test_a_closure_that_evaluates_the_batch_of_the_moment_is_called_once_and_its_gradients_make_pairs():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    net = Net(module, SGDOL(module.parameters(), lr=0.01))
    with pytest.warns(UserWarning, match="every second step") as caught:
        calls = [net.train_step(x, x.sum(1, keepdim=True)) for x in torch.randn(200, 16, 3).unbind()]
    assert calls == [1] * 200
    assert len(caught) == 1
    assert net.opt.diagnostics()["updates"] == 100
    assert sum(net.losses[-20:]) < sum(net.losses[:20]) / 3
