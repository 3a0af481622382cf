"""A batch that SGDOLFree runs again is the same batch: random numbers, casts, checkpoints, and what fails half-way."""

import contextlib
import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from free_problems import PROBLEMS, joined, reference, train
from loops import batch, closure_of, fit, flat, net_closure, network, objective, plain
from pairs import pairwise
from processes import in_threads
from torch.utils.checkpoint import checkpoint

from sgdol import SGDOLFree
from sgdol.torch import backward


def clipped_to(max_norm):
    """One step of a loop that clips between backward and step, as clip_grad_norm_, which adds 1e-6 to the norm."""

    def step(opt, params, loss, t):
        backward(lambda parts: sum(loss(joined(params), t, part) for part in parts) / len(parts), [0, 1])
        norm = torch.linalg.vector_norm(torch.cat([p.grad.reshape(-1) for p in params]))
        if norm > max_norm:
            for p in params:
                p.grad.mul_(max_norm / norm)
        opt.step()
        opt.zero_grad()

    return step


@pairwise(problem=list(PROBLEMS), max_norm=[0.1, 3.0], options=[{}, {"metric": "euclidean"}])
def test_clipping_between_backward_and_step_agrees_with_the_reference(problem, max_norm, options):
    """Curvatures are those of the gradients as they were; the step is made with the shorter ones."""
    expected = reference(problem, max_norm=max_norm, **options)
    assert expected.clipped > 0
    train(problem, step=clipped_to(max_norm), **options).agrees_with(expected, rtol=1e-11)


def test_a_closure_called_again_draws_the_same_random_numbers():
    net = network()
    opt = SGDOLFree(net.parameters())
    for t in range(4):
        calls = []
        torch.manual_seed(t)
        opt.step(net_closure(opt, net, batch(t), after=lambda calls=calls: calls.append(torch.rand(1).item())))
        assert len(calls) > 1
        assert len(set(calls)) == 1


def test_random_numbers_go_on_as_after_one_call():
    after = []
    for make in (SGDOLFree, lambda params: torch.optim.SGD(params, lr=0.0)):
        net = network()
        opt = make(net.parameters())
        torch.manual_seed(0)
        opt.step(net_closure(opt, net, batch(0)))
        after.append(torch.rand(3))
    assert torch.equal(*after)


class Interrupted(BaseException):
    """Like Ctrl-C."""


@pairwise(step=[0, 2, 5], call=[0, 1, 2], error=[OSError, Interrupted])
def test_training_goes_on_after_a_closure_that_raised(step, call, error):
    """In the first step while it is probed, later inside a look-back: as if the step had not been tried."""
    results = []
    raising = call < 2 or step == 0
    for raises in (False, True):
        net = network()
        opt = SGDOLFree(net.parameters())
        fit(net, opt, range(step))
        calls = []

        def fail(calls=calls):
            calls.append(1)
            if len(calls) == call + 1:
                raise error("now")

        before = copy.deepcopy(net.state_dict())
        torch.manual_seed(step)
        if raises:
            with pytest.raises(error, match="now") if raising else contextlib.nullcontext():
                opt.step(net_closure(opt, net, batch(step), after=fail))
        if raises and raising:
            for name, value in net.state_dict().items():
                buffers_of_the_first_call = call == 0 and name.startswith("1.")
                assert buffers_of_the_first_call or torch.equal(value, before[name]), name
            net.load_state_dict(before)  # the buffers, if it was the first call
            opt.moved()
            torch.manual_seed(step)
        if not (raises and not raising):
            opt.step(net_closure(opt, net, batch(step)))
        opt.zero_grad()
        results.append(fit(net, opt, range(step + 1, step + 8)))
    assert results[0] == results[1]


class FailingAt:
    """A loss that raises an error in its n-th call, once."""

    def __init__(self, net, call):
        self.net, self.calls = net, call

    def __call__(self, x):
        self.calls -= 1
        if self.calls == 0:
            raise MemoryError("not enough memory")
        return objective(self.net, x)


def test_gradients_of_a_backward_that_failed_half_way_are_named():
    net = network()
    opt, loss = SGDOLFree(net.parameters()), FailingAt(net, 2)
    with pytest.raises(MemoryError) as raised:
        backward(loss, batch(0))
    assert "gradients of its earlier parts in .grad: call zero_grad()" in raised.value.__notes__[0]
    backward(loss, batch(0))
    with pytest.raises(RuntimeError, match=r"backward\(\) raised an error before its last part, .* opt\.zero_grad\(\)"):
        opt.step()
    opt.zero_grad()
    backward(loss, batch(0))
    opt.step()
    assert opt.diagnostics()["gradients"] == 2


def test_a_step_whose_look_back_failed_can_be_tried_again_at_once():
    """The second attempt makes the step that a run without the failure makes."""
    moved = []
    for call in (3, 0):  # 3: the first pass of a look-back
        net = plain()  # no dropout: a second attempt draws other masks
        opt, loss = SGDOLFree(net.parameters()), FailingAt(net, call)
        backward(loss, batch(0))
        if call:
            with pytest.raises(MemoryError) as raised:
                opt.step()
            assert not hasattr(raised.value, "__notes__")
            backward(loss, batch(0))
        opt.step()
        moved.append(flat(net.parameters()))
    assert torch.equal(*moved)


def test_the_batch_is_kept_until_the_step_has_ended_and_no_longer():
    net = network()
    opt = SGDOLFree(net.parameters())
    for t in range(3):
        x = batch(t)
        gone = weakref.ref(x)
        backward(lambda x: objective(net, x), x)
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
        net = plain()
        opt, seen = SGDOLFree(net.parameters()), []

        def loss_fn(x, net=net, seen=seen):
            seen.append(x.sum().item())
            return objective(net, x)

        for t in range(3):
            if gives_up:
                backward(loss_fn, batch(100 + t))
                (opt if dropped == "zero_grad" else net).zero_grad()
                seen.clear()
            backward(loss_fn, batch(t))
            opt.step()
            opt.zero_grad()
        runs.append((flat(net.parameters()), seen))
    assert torch.equal(runs[0][0], runs[1][0])
    assert set(runs[1][1]) == {half.sum().item() for half in batch(2).chunk(2)}


@pytest.mark.parametrize("closure", [False, True])
def test_autocast_is_there_when_the_batch_is_run_again_and_casts_no_earlier_weights(closure):
    """Without it the batch would look like another one. Weights are cast once within an autocast block."""

    def lower():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def run(around):
        net, kinds = plain(torch.float32), set()
        opt = SGDOLFree(net.parameters(), metric="rms")

        def loss_fn(x):
            with contextlib.nullcontext() if not closure or around else lower():
                out = net(x)
            kinds.add(out.dtype)
            return (out.float() - x.sum(1, keepdim=True)).square().mean()

        with lower() if around else contextlib.nullcontext():
            for t in range(10):
                x = batch(t, dtype=torch.float32)
                if closure:
                    opt.step(closure_of(opt, lambda x=x: [loss_fn(half) / 2 for half in x.chunk(2)]))
                    continue
                with contextlib.nullcontext() if around else lower():
                    backward(loss_fn, x)
                opt.step()
                opt.zero_grad()
        assert kinds == {torch.bfloat16}
        assert opt.diagnostics()["evaluations"] > 10
        return flat(net.parameters())

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments_run_again(reentrant):
    """The segments of reentrant checkpointing are graph tasks of their own, inside of another."""
    runs = []
    for checkpointed in (False, True):
        net = plain()

        def model(x, net=net, checkpointed=checkpointed):
            x = x.clone().requires_grad_()
            hidden = checkpoint(net[0], x, use_reentrant=reentrant) if checkpointed else net[0](x)
            return net[2](net[1](hidden))

        opt = SGDOLFree(net.parameters())
        for t in range(10):
            backward(lambda x, model=model: objective(model, x), batch(t))
            opt.step()
            opt.zero_grad()
        runs.append(flat(net.parameters()))
    torch.testing.assert_close(*runs)


def test_two_trainings_in_two_threads_do_not_meet():
    nets = [plain() for _ in range(3)]

    def train(net):
        fit(net, SGDOLFree(net.parameters()), range(30))

    in_threads(lambda: train(nets[0]), lambda: train(nets[1]))
    train(nets[2])
    one, two, alone = (flat(net.parameters()) for net in nets)
    np.testing.assert_array_equal(one, alone)
    np.testing.assert_array_equal(two, alone)
