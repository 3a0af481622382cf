"""backward(); step(); zero_grad(): SGDOLFree without a closure is SGDOLFree with one, to the last bit."""

import contextlib
import gc
import math
import weakref

import numpy as np
import pytest
import torch
from processes import in_threads
from torch import nn
from torch.utils.checkpoint import checkpoint

from sgdol import SGDOL, SGDOLFree
from sgdol.torch import backward


def network(seed: int = 0, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 1))


def batch(t: int, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(t))
    return x, x.sum(1, keepdim=True).sin()


def loss_of(net):
    return lambda x, y: nn.functional.mse_loss(net(x), y)


def halves(t: int) -> list[tuple[torch.Tensor, ...]]:
    x, y = batch(t)
    return list(zip(x.chunk(2), y.chunk(2), strict=True))


def broken(t: int, burst: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch; the seventh is not finite, and the fifteenth jumps."""
    x, y = batch(t)
    return x * {7: math.nan, 15: burst}.get(t, 1.0), y


def run(scheme: str, steps: int = 40, width: int = 8, burst: float = 50.0, **options):
    """Train in one of four shapes of a loop."""
    net = network(width=width)
    opt, losses, outside = SGDOLFree(net.parameters(), **options), [], []
    torch.manual_seed(1)
    for t in range(steps):
        x, y = broken(t, burst)
        calls = [(x, y)] if "once" in scheme else list(zip(x.chunk(2), y.chunk(2), strict=True))

        def evaluate(calls=calls):
            total = torch.zeros(())
            for a, b in calls:
                total = total + backward(lambda a, b: loss_of(net)(a, b) / len(calls), a, b)
            return total

        if "closure" in scheme:

            def closure(evaluate=evaluate):
                opt.zero_grad()
                return evaluate()

            losses.append(opt.step(closure))
        else:
            losses.append(evaluate())
            opt.step()
            opt.zero_grad()
        outside.append(torch.rand(1))
    return net, opt, torch.stack(losses), torch.cat(outside)


@pytest.mark.parametrize("options", [{}, {"metric": "euclidean"}, {"weight_decay": 0.1, "momentum": 0.5}], ids=str)
@pytest.mark.parametrize("width", [8, 4000])
@pytest.mark.parametrize("calls", ["once", "twice"])
def test_the_run_without_a_closure_is_the_run_with_one_to_the_last_bit(calls, width, options):
    """Dropout, BatchNorm, a batch that is not finite, a jump, rejections; tensors that are merged or not."""
    steps = 40 if width == 8 else 20
    net, opt, losses, outside = run(calls, steps, width, **options)
    other, with_closure, theirs, theirs_outside = run(f"{calls} in a closure", steps, width, **options)
    assert torch.equal(losses.nan_to_num(), theirs.nan_to_num())
    assert torch.equal(outside, theirs_outside)
    for (name, a), b in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert opt.diagnostics() == with_closure.diagnostics()
    assert opt.diagnostics()["skipped"] == 1
    assert opt.diagnostics()["evaluations"] > steps + 10
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        for name, value in opt.state[p].items():
            assert torch.equal(value, with_closure.state[q][name]), name


def test_autocast_around_backward_is_there_when_it_is_run_again():
    """Without it the same batch would look like another one, which is an error in the first step."""
    net = network()
    opt, kinds = SGDOLFree(net.parameters()), []

    def loss_fn(x, y):
        out = net(x)
        kinds.append(out.dtype)
        return nn.functional.mse_loss(out.float(), y)

    for t in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            backward(loss_fn, *batch(t))
        opt.step()
        opt.zero_grad()
    assert len(kinds) > 2 * opt.diagnostics()["updates"] > 0
    assert set(kinds) == {torch.bfloat16}


def test_the_batch_is_kept_until_the_step_has_ended_and_no_longer():
    net = network()
    opt = SGDOLFree(net.parameters())
    for t in range(3):
        x, y = batch(t)
        gone = weakref.ref(x)
        backward(loss_of(net), x, y)
        del x
        gc.collect()
        assert gone() is not None
        opt.step()
        gc.collect()
        assert gone() is None
        opt.zero_grad()


@pytest.mark.parametrize("dropped", ["zero_grad", "model.zero_grad"])
def test_a_batch_that_was_given_up_is_not_run_again(dropped):
    runs = []
    for gives_up in (False, True):
        net = network()[::4]
        opt, seen = SGDOLFree(net.parameters()), []

        def loss_fn(x, y, net=net, seen=seen):
            seen.append(x.sum().item())
            return loss_of(net)(x, y)

        for t in range(3):
            if gives_up:
                backward(loss_fn, *batch(100 + t))
                (opt if dropped == "zero_grad" else net).zero_grad()
                seen.clear()
            backward(loss_fn, *batch(t))
            opt.step()
            opt.zero_grad()
        runs.append((seen, [p.detach() for p in net.parameters()]))
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=0, atol=0)
    assert {round(value, 4) for value in runs[1][0]} == {round(x.sum().item(), 4) for x, _ in halves(2)}


def test_the_loop_is_the_same_for_both_optimizers():
    for make in (SGDOLFree, lambda params: SGDOL(params, lr=0.1)):
        net = network()
        opt = make(net.parameters())
        losses = []
        for t in range(100):
            losses.append(float(backward(loss_of(net), *batch(t))))
            opt.step()
            opt.zero_grad()
        assert sum(losses[-10:]) < 0.7 * sum(losses[:10])  # dropout keeps it up
        assert opt.diagnostics()["gradients"] == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments_run_again(reentrant):
    """The segments of reentrant checkpointing are graph tasks of their own, inside of another."""
    runs = []
    for checkpointed in (False, True):
        net = network()[::2]

        def loss_fn(x, y, net=net, checkpointed=checkpointed):
            x = x.clone().requires_grad_()
            hidden = checkpoint(net[0], x, use_reentrant=reentrant) if checkpointed else net[0](x)
            return nn.functional.mse_loss(net[2](net[1](hidden)), y)

        opt = SGDOLFree(net.parameters())
        for t in range(10):
            backward(loss_fn, *batch(t))
            opt.step()
            opt.zero_grad()
        runs.append([p.detach() for p in net.parameters()])
    torch.testing.assert_close(runs[0], runs[1])


def test_two_trainings_in_two_threads_do_not_meet():
    nets = {name: network().eval() for name in "abc"}  # dropout would draw from one generator

    def train(name):
        net = nets[name]
        opt = SGDOLFree(net.parameters())
        for t in range(30):
            backward(loss_of(net), *batch(t))
            opt.step()
            opt.zero_grad()

    in_threads(lambda: train("a"), lambda: train("b"))
    train("c")
    for a, b, c in zip(*(nets[name].parameters() for name in "abc"), strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, c)


# What a batch may be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, range], ids=lambda kind: kind.__name__)
def test_indices_stand_for_samples(kind):
    x, y = batch(0)
    net = network().eval()
    seen = []

    def loss_fn(indices):
        seen.append([int(i) for i in indices])
        return loss_of(net)(x[indices], y[indices])

    order = [2, 3, 4, 5, 6, 7, 8] if kind is range else [5, 3, 8, 1, 0, 2, 7]
    whole = loss_fn(order)
    found = backward(loss_fn, range(2, 9) if kind is range else kind(order))
    torch.testing.assert_close(found, whole.detach())
    assert seen == [order, order[:3], order[3:]]


def test_a_loss_that_is_a_sum_is_differentiated_as_one():
    x, y = batch(0, rows=7)
    net, whole = network().eval(), network().eval()
    loss = nn.functional.mse_loss(whole(x), y, reduction="sum")
    loss.backward()
    found = backward(lambda x, y: nn.functional.mse_loss(net(x), y, reduction="sum"), x, y, reduction="sum", parts=3)
    torch.testing.assert_close(found, loss.detach())
    for p, q in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_last_batch_of_one_sample_is_left_out_and_said_once():
    net = network().eval()
    opt = SGDOLFree(net.parameters())
    for rows in (8, 1, 8, 1):
        before = [p.detach().clone() for p in net.parameters()]
        updates = opt.diagnostics()["updates"]
        backward(loss_of(net), *batch(rows, rows))
        if rows == 1 and updates == 1:
            with pytest.warns(UserWarning, match="batch of a single sample .* leaves such steps out"):
                opt.step()
        else:
            opt.step()
        opt.zero_grad()
        moved = any(not torch.equal(p, x) for p, x in zip(net.parameters(), before, strict=True))
        assert moved == (rows == 8)
    assert opt.diagnostics()["updates"] == 2


def test_a_last_batch_of_one_sample_is_left_out_by_a_closure_too():
    """It raised, and advised to split the one sample."""
    net = network().eval()
    opt = SGDOLFree(net.parameters())
    for rows in (8, 1, 8):
        x, y = batch(rows, rows)

        def closure(x=x, y=y):
            opt.zero_grad()
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                (loss_of(net)(a, b) * len(a) / len(x)).backward()
            return loss_of(net)(x, y)

        with contextlib.nullcontext() if rows > 1 else pytest.warns(UserWarning, match="leaves such steps out"):
            opt.step(closure)
    assert opt.diagnostics()["updates"] == 2


def test_single_samples_may_be_accumulated():
    net = network().eval()
    opt = SGDOLFree(net.parameters())
    for t in range(3):
        backward(loss_of(net), *batch(t, 1))
        backward(loss_of(net), *batch(10 + t, 1))
        opt.step()
        opt.zero_grad()
    assert (opt.diagnostics()["updates"], opt.diagnostics()["gradients"]) == (3, 2)


# Misuse ---------------------------------------------------------------------------------------------------------------


def test_an_ordinary_loop_is_shown_the_line_to_change():
    net = network()
    opt = SGDOLFree(net.parameters())
    loss_of(net)(*batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"sgdol\.torch\.backward\(lambda x, y: criterion\(model\(x\), y\), inputs"):
        opt.step()
    opt.zero_grad()
    backward(loss_of(net), *batch(0))
    loss_of(net)(*batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"cannot do after loss\.backward\(\)"):
        opt.step()
    opt.zero_grad()
    backward(loss_of(net), *batch(0))
    opt.step()


def test_a_step_without_anything_new_is_an_error():
    net = network()
    opt = SGDOLFree(net.parameters())
    with pytest.raises(RuntimeError, match="no new gradients"):
        opt.step()
    backward(loss_of(net), *batch(0))
    opt.step()
    with pytest.raises(RuntimeError, match="no new gradients"):
        opt.step()
    backward(loss_of(net), *batch(1))
    with pytest.raises(RuntimeError, match="gradients were not zeroed after the last step"):
        opt.step()


class FailingAt:
    """A loss that raises an error in its n-th call, once."""

    def __init__(self, net, call):
        self.loss, self.calls = loss_of(net), call

    def __call__(self, *arguments):
        self.calls -= 1
        if self.calls == 0:
            raise MemoryError("not enough memory")
        return self.loss(*arguments)


def test_gradients_of_a_backward_that_failed_half_way_are_named():
    net = network()
    opt, loss = SGDOLFree(net.parameters()), FailingAt(net, 2)
    with pytest.raises(MemoryError) as raised:
        backward(loss, *batch(0))
    assert "gradients of its earlier parts in .grad: call zero_grad()" in raised.value.__notes__[0]
    backward(loss, *batch(0))
    with pytest.raises(RuntimeError, match=r"backward\(\) raised an error before its last part, .* opt\.zero_grad\(\)"):
        opt.step()
    opt.zero_grad()
    backward(loss, *batch(0))
    opt.step()
    assert opt.diagnostics()["gradients"] == 2


def test_a_step_whose_look_back_failed_can_be_tried_again_at_once():
    """The second attempt makes the step that a run without the failure makes."""
    moved = []
    for call in (3, 0):  # 3: the first pass of a look-back
        net = network().eval()  # no dropout: a second attempt draws other masks
        opt, loss = SGDOLFree(net.parameters()), FailingAt(net, call)
        backward(loss, *batch(0))
        if call:
            with pytest.raises(MemoryError) as raised:
                opt.step()
            assert not hasattr(raised.value, "__notes__")
            backward(loss, *batch(0))
        opt.step()
        moved.append([p.detach().clone() for p in net.parameters()])
    for p, q in zip(*moved, strict=True):
        assert torch.equal(p, q)


def test_a_first_batch_of_one_sample_is_an_error():
    net = network().eval()
    opt = SGDOLFree(net.parameters())
    backward(loss_of(net), *batch(0, 1))
    with pytest.raises(RuntimeError, match="the first batch has a single sample"):
        opt.step()


def test_one_part_is_one_gradient_too_few():
    net = network()
    opt = SGDOLFree(net.parameters())
    backward(loss_of(net), *batch(0), parts=1)
    with pytest.raises(RuntimeError, match="needs at least two independent gradients"):
        opt.step()


def test_a_loss_fn_that_changes_is_an_error_in_the_first_step():
    net = network()
    opt, draws = SGDOLFree(net.parameters()), np.random.default_rng(0)
    backward(lambda x, y: loss_of(net)(x * draws.normal(), y), *batch(0))
    with pytest.raises(RuntimeError, match=r"loss_fn, .* does not evaluate the same batch each time"):
        opt.step()


def test_two_optimizers_of_one_loss_are_told_to_be_one():
    net = network()
    opts = [SGDOLFree(net[0].parameters()), SGDOLFree(net[1:].parameters())]
    backward(loss_of(net), *batch(0))
    opts[0].step()
    with pytest.raises(RuntimeError, match=r"look-back of another optimizer .* Give all parameters to one SGDOLFree"):
        opts[1].step()
    for opt in opts:  # as in a GAN: each zeroes before its own backward
        opt.zero_grad()
        backward(loss_of(net), *batch(1))
        opt.step()


CRITERION = r"function of the batch that calls the model, .*backward\(lambda x, y: criterion\(model\(x\), y\)"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda net, x, y: (nn.MSELoss(), x, y), TypeError, rf"{CRITERION}"),
        (lambda net, x, y: (nn.MSELoss(), net(x), y), TypeError, rf"{CRITERION}"),
        (lambda net, x, y: (nn.functional.l1_loss, net(x), y), ValueError, r"batch\[0\] comes out of a model"),
        (lambda net, x, y: (nn.functional.l1_loss, x, x), ValueError, "depends on no parameter: .* got <function l1"),
        (lambda net, x, y: (loss_of(net)(x, y),), TypeError, r"must be a function of the batch, got a tensor of shape"),
    ],
    ids=["criterion", "criterion of an output", "function of an output", "function of the data", "loss"],
)
def test_what_is_not_a_function_of_the_batch_is_named(arguments, error, message):
    net = network()
    with pytest.raises(error, match=message):
        backward(*arguments(net, *batch(0)))


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match=r'reduction must be "mean" or "sum", .* got \'none\''):
        backward(lambda x: x, torch.ones(2), reduction="none")
