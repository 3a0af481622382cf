"""backward(); step(); zero_grad(): SGDOLFree without a closure is that with one; and what a loop gets wrong is said."""

import contextlib
import math

import numpy as np
import pytest
import torch
from loops import batch, closure_of, fit, flat, net_closure, objective, plain
from pairs import pairwise
from torch import nn

from sgdol import SGDOLFree
from sgdol.torch import backward


def run(width: int, calls: int, in_a_closure: bool, options: dict):
    """Train in one of four shapes of a loop; the seventh batch is not finite, and the fifteenth jumps."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 1)]
    net = nn.Sequential(*layers)
    opt, losses, outside = SGDOLFree(net.parameters(), **options), [], []
    torch.manual_seed(1)
    for t in range(20):
        x = batch(t, dtype=torch.float32) * {7: math.nan, 15: 50.0}.get(t, 1.0)

        def evaluate(x=x):
            return sum(backward(lambda y: objective(net, y) / calls, part) for part in x.chunk(calls))

        if in_a_closure:
            losses.append(opt.step(lambda evaluate=evaluate: (opt.zero_grad(), evaluate())[1]))
        else:
            losses.append(evaluate())
            opt.step()
            opt.zero_grad()
        outside.append(torch.rand(1))
    return net, opt, torch.stack(losses).nan_to_num(), torch.cat(outside)


@pairwise(options=[{}, {"metric": "euclidean"}, {"weight_decay": 0.1, "momentum": 0.5}], width=[8, 4000], calls=[1, 2])
def test_the_run_without_a_closure_is_the_run_with_one_to_the_last_bit(options, width, calls):
    """Dropout, BatchNorm, a batch that is not finite, a jump, rejections; tensors that are merged or not."""
    net, opt, losses, outside = run(width, calls, False, options)
    other, with_closure, theirs, theirs_outside = run(width, calls, True, options)
    assert torch.equal(losses, theirs)
    assert torch.equal(outside, theirs_outside)
    for (name, a), b in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert opt.diagnostics() == with_closure.diagnostics()
    assert opt.diagnostics()["skipped"] == 1
    assert opt.diagnostics()["evaluations"] > 25
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        for name, value in opt.state[p].items():
            assert torch.equal(value, with_closure.state[q][name]), name


@pytest.mark.parametrize("closure", [False, True])
def test_a_last_batch_of_one_sample_is_left_out_and_said_once(closure):
    net = plain()
    opt = SGDOLFree(net.parameters())
    for t, rows in enumerate((8, 1, 8, 1)):
        before = flat(net.parameters())
        with pytest.warns(UserWarning, match="leaves such steps out") if t == 1 else contextlib.nullcontext():
            if closure:
                opt.step(net_closure(opt, net, batch(t, rows)))
            else:
                backward(lambda x: objective(net, x), batch(t, rows))
                opt.step()
        opt.zero_grad()
        assert torch.equal(before, flat(net.parameters())) == (rows == 1)
    assert opt.diagnostics()["updates"] == 2


def test_single_samples_may_be_accumulated():
    net = plain()
    opt = SGDOLFree(net.parameters())
    for t in range(3):
        for number in (t, 10 + t):
            backward(lambda x: objective(net, x), batch(number, 1))
        opt.step()
        opt.zero_grad()
    assert (opt.diagnostics()["updates"], opt.diagnostics()["gradients"]) == (3, 2)


# Misuse ---------------------------------------------------------------------------------------------------------------


def loss_of(net):
    return lambda x: objective(net, x)


def an_ordinary_pass(net, opt):
    objective(net, batch(0)).backward()


def no_pass(net, opt):
    pass


def a_step_more(net, opt):
    fit(net, opt, [0])


def another_pass_after_backward(net, opt):
    backward(loss_of(net), batch(0))
    objective(net, batch(0)).backward()


def gradients_that_were_not_zeroed(net, opt):
    for t in range(2):
        backward(loss_of(net), batch(t))
        if t == 0:
            opt.step()


def one_sample(net, opt):
    backward(loss_of(net), batch(0, 1))


def one_part(net, opt):
    backward(loss_of(net), batch(0), parts=1)


def another_function_each_time(net, opt):
    draws = np.random.default_rng(0)
    backward(lambda x: objective(net, x * draws.normal()), batch(0))


def tensors_clipped_one_by_one(net, opt):
    backward(loss_of(net), batch(0))
    for p in net.parameters():
        nn.utils.clip_grad_norm_([p], 1e-3)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (an_ordinary_pass, r"sgdol\.torch\.backward\(lambda x, y: criterion\(model\(x\), y\), inputs"),
        (another_pass_after_backward, r"cannot do after loss\.backward\(\)"),
        (no_pass, "no new gradients"),
        (a_step_more, "no new gradients"),
        (gradients_that_were_not_zeroed, "gradients were not zeroed after the last step"),
        (one_sample, "the first batch has a single sample"),
        (one_part, "needs at least two independent gradients"),
        (another_function_each_time, r"loss_fn, .* does not evaluate the same batch each time"),
        (tensors_clipped_one_by_one, r"multiplied by different factors .* clip_grad_norm_ of all parameters"),
    ],
)
def test_what_a_loop_gets_wrong_is_an_error_after_which_it_goes_on(mistake, message):
    net = plain()
    opt = SGDOLFree(net.parameters())
    mistake(net, opt)
    with pytest.raises(RuntimeError, match=message):
        opt.step()
    opt.zero_grad()
    fit(net, opt, [1])
    assert opt.diagnostics()["gradients"] == 2


def test_two_optimizers_of_one_loss_are_told_to_be_one():
    net = plain()
    opts = [SGDOLFree(net[0].parameters()), SGDOLFree(net[1:].parameters())]
    backward(loss_of(net), batch(0))
    opts[0].step()
    with pytest.raises(RuntimeError, match=r"look-back of another optimizer .* Give all parameters to one SGDOLFree"):
        opts[1].step()
    for opt in opts:  # as in a GAN: each zeroes before its own backward
        opt.zero_grad()
        fit(net, opt, [1])


def nested_passes(net, opt):
    """The second runs inside of the first."""

    def closure():
        opt.zero_grad()
        outer, inner = (objective(net, part) / 2 for part in batch(0).chunk(2))
        waiting = [inner]
        handle = net[2].bias.register_post_accumulate_grad_hook(lambda _: waiting.pop().backward() if waiting else None)
        outer.backward()
        handle.remove()
        return outer

    return closure


def zeroed_between(zero, parts):
    def make(net, opt):
        def losses():
            for index, part in enumerate(batch(0).chunk(parts)):
                if index:
                    zero(net, opt)
                yield objective(net, part)

        return closure_of(opt, losses)

    return make


def new_batches(net, opt):
    numbers = iter(range(100))
    return lambda: net_closure(opt, net, batch(next(numbers)))()


ZEROED = r"zero between the backward passes.*call opt.zero_grad\(\) once"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda net, opt: lambda: 1.0, RuntimeError, "there is no gradient"),
        (lambda net, opt: lambda: None, TypeError, "must return the loss"),
        (new_batches, RuntimeError, "does not evaluate the same batch"),
        (lambda net, opt: net_closure(opt, net, batch(0), 1), RuntimeError, r"backward\(\) 1 time.*Split the batch"),
        (nested_passes, RuntimeError, r"ran backward\(\) 1 time"),
        (zeroed_between(lambda net, opt: opt.zero_grad(), 2), RuntimeError, ZEROED),
        (zeroed_between(lambda net, opt: opt.zero_grad(set_to_none=False), 3), RuntimeError, ZEROED),
        (zeroed_between(lambda net, opt: net.zero_grad(set_to_none=False), 2), RuntimeError, ZEROED),
        (zeroed_between(lambda net, opt: [p.grad.data.zero_() for p in net.parameters()], 3), RuntimeError, ZEROED),
    ],
    ids=["no pass", "no loss", "new batches", "one pass", "nested", *("zeroed" for _ in range(4))],
)
def test_what_a_closure_gets_wrong_is_an_error_and_moves_nothing(make, error, message):
    net = plain()
    opt = SGDOLFree(net.parameters())
    before = flat(net.parameters())
    with pytest.raises(error, match=message):
        opt.step(make(net, opt))
    assert torch.equal(before, flat(net.parameters()))
