"""Accelerate with SGDOLFree, with batches that are split, and at the average: as a loop by hand, to the last bit."""

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from trainer_problems import BATCH, BATCHES, build, by_samples, make, step_by_hand

from sgdol import SGDOL
from sgdol.trainers.accelerate import AveragedWeights, Microbatches, StepSizeMonitor


def data(digits, samples=BATCHES * BATCH) -> DataLoader:
    return DataLoader(TensorDataset(digits[0][:samples], digits[1][:samples]), batch_size=BATCH)


class Run:
    """A training program; its batches start at any place, with random numbers that depend on it alone."""

    def __init__(self, digits, kind="free", accumulate=1, samples=BATCHES * BATCH, **options):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
        model = build()
        self.opt = make(kind, model.parameters())
        self.model, prepared, self.loader = self.accelerator.prepare(model, self.opt, data(digits, samples))
        self.microbatches = Microbatches(self.accelerator, self.model, prepared)
        self.averaged = AveragedWeights(self.accelerator, self.model, prepared)
        self.monitor = StepSizeMonitor(self.accelerator, every=1)

    def objective(self, images, labels):
        return cross_entropy(self.model(images), labels)

    def train(self, start=0, stop=BATCHES):
        losses = []
        for number, batch in enumerate(self.accelerator.skip_first_batches(self.loader, start), start=start):
            if number == stop:
                break
            torch.manual_seed(number)
            with self.accelerator.accumulate(self.model):
                losses.append(self.microbatches.step(self.objective, *batch))
                self.monitor(self.microbatches.optimizer)
        return losses


def by_hand(kind, steps, precision=None):
    """The loop that is promised, written out: each step has a seed and its parts."""
    net = build()
    opt = make(kind, net.parameters())
    losses = []

    def objective(images, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is not None):
            logits = net(images)
        return cross_entropy(logits.float(), labels)

    for seed, parts in steps:
        torch.manual_seed(seed)
        losses.append(step_by_hand(kind, opt, parts, by_samples(parts), objective))
    return net, opt, losses


def halves(batch):
    images, labels = batch
    cut = len(labels) // 2
    return [(images[:cut], labels[:cut]), (images[cut:], labels[cut:])]


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("kind", ["free", "base"])
def test_every_batch_is_a_step_with_two_gradients(digits, assert_same, kind, precision):
    """The last batch has five samples, which count as five."""
    samples = (BATCHES - 1) * BATCH + 5
    run = Run(digits, kind, samples=samples, mixed_precision=precision or "no")
    losses = run.train()
    net, opt, expected = by_hand(kind, [(i, halves(batch)) for i, batch in enumerate(data(digits, samples))], precision)
    assert_same(run.accelerator.unwrap_model(run.model), run.opt, net, opt)
    assert losses == expected
    assert run.opt.diagnostics()["gradients"] == 2
    assert run.opt.diagnostics()["updates"] == BATCHES
    assert [row["updates"] for row in run.monitor.history] == list(range(1, BATCHES + 1))


@pytest.mark.parametrize("kind", ["free", "base"])
def test_accumulated_batches_are_the_gradients_of_one_step(digits, assert_same, kind):
    """Seven batches by two: an epoch ends with a single one, which is split, and counts as it should."""
    run = Run(digits, kind, accumulate=2, samples=7 * BATCH)
    losses = run.train()
    batches = list(data(digits, 7 * BATCH))
    steps = [(i + 1, batches[i : i + 2]) for i in (0, 2, 4)]
    net, opt, expected = by_hand(kind, [*steps, (6, halves(batches[6]))])
    assert_same(run.accelerator.unwrap_model(run.model), run.opt, net, opt)
    assert losses == [None, expected[0], None, expected[1], None, expected[2], expected[3]]
    assert run.opt.diagnostics()["gradients"] == 2


@pytest.mark.parametrize("kind", ["free", "base"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one_and_the_saved_model_is_the_average(
    tmp_path, digits, assert_same, kind, inside
):
    whole, first = Run(digits, kind), Run(digits, kind)
    whole.train()
    first.train(stop=7)
    if inside:
        with first.averaged:
            first.accelerator.save_state(tmp_path / "stopped")
    else:
        first.accelerator.save_state(tmp_path / "stopped")
    iterate = first.model[0].weight.detach().clone()
    with first.opt.averaged():
        average = first.model[0].weight.detach().clone()
    assert not torch.equal(iterate, average)
    assert torch.equal(load_file(tmp_path / "stopped" / "model.safetensors")["0.weight"], average)

    resumed = Run(digits, kind)
    resumed.accelerator.load_state(tmp_path / "stopped")
    assert torch.equal(resumed.model[0].weight, iterate)
    resumed.train(start=7)
    first.train(start=7)  # saving has changed nothing
    for run in (resumed, first):
        assert_same(run.model, run.opt, whole.model, whole.opt)


def test_inside_the_weights_are_the_average_and_afterwards_training_goes_on(tmp_path, digits, assert_same):
    plain, run = Run(digits), Run(digits)
    plain.train()
    run.train(stop=6)
    with run.averaged:
        inside = run.model[0].weight.detach().clone()
        run.accelerator.save_model(run.model, tmp_path)
    with run.opt.averaged():
        assert torch.equal(run.model[0].weight, inside)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["0.weight"], inside)
    run.train(start=6)
    assert_same(run.model, run.opt, plain.model, plain.opt)


def test_what_cannot_be_is_said_in_a_sentence():
    accelerator = Accelerator(cpu=True)
    net = build()
    model, opt = accelerator.prepare(net, SGDOL(net.parameters(), lr=0.5))
    with pytest.raises(ValueError, match="AveragedWeights needs averages: give it an SGDOLFree, or an SGDOL with"):
        AveragedWeights(accelerator, model, opt)
    with pytest.raises(ValueError, match="parts must be a whole number of gradients, at least 2, got 1"):
        Microbatches(accelerator, model, opt, parts=1)
    with pytest.raises(TypeError, match="optimizer must be an SGDOL or SGDOLFree, as prepared, got AcceleratedOptimi"):
        Microbatches(accelerator, model, accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1)))
