"""Accelerate trains as a loop by hand does, to the last bit: with whole batches, and with batches that are split."""

import contextlib

import pytest
import torch
import trainer_problems
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from trainer_problems import BATCH, BATCHES, build, halves, make

import sgdol
from sgdol import SGDOL
from sgdol.trainers.accelerate import AveragedWeights, Microbatches, StepSizeMonitor

pytestmark = pytest.mark.filterwarnings("ignore:SGDOL got one backward")  # pairs of batches are tested


def data(digits, samples=BATCHES * BATCH) -> DataLoader:
    return DataLoader(TensorDataset(digits[0][:samples], digits[1][:samples]), batch_size=BATCH)


class Run:
    """A training program; its batches start at any place, with random numbers that depend on it alone.

    Batches stay "whole", as in Accelerate's documentation, or are split, for SGDOLFree or SGDOL with averages.
    """

    def __init__(self, digits, kind="free", accumulate=1, clip=None, samples=BATCHES * BATCH, every=1, **options):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
        net = build()
        self.opt, self.kind, self.clip = make(kind, net.parameters()), kind, clip
        self.model, self.prepared, self.loader = self.accelerator.prepare(net, self.opt, data(digits, samples))
        self.monitor = StepSizeMonitor(self.accelerator, every=every)
        self.accelerator.register_for_checkpointing(self.monitor)
        if kind != "whole":
            self.microbatches = Microbatches(self.accelerator, self.model, self.prepared)
            self.averaged = AveragedWeights(self.accelerator, self.model, self.prepared)

    def objective(self, images, labels):
        return cross_entropy(self.model(images), labels)

    def step(self, batch):
        if self.kind != "whole":
            return self.microbatches.step(self.objective, *batch)
        self.accelerator.backward(self.objective(*batch))
        if self.accelerator.sync_gradients and self.clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
        self.prepared.step()
        self.prepared.zero_grad()
        return None

    def train(self, start=0, stop=BATCHES):
        losses = []
        for number, batch in enumerate(self.accelerator.skip_first_batches(self.loader, start), start=start):
            if number == stop:
                break
            torch.manual_seed(number)
            with self.accelerator.accumulate(self.model):
                losses.append(self.step(batch))
                self.monitor(self.prepared)
        return losses

    @property
    def weight(self):
        return self.model[0].weight.detach().clone()


def by_hand(kind, steps, precision=None, clip=None):
    """The model, the optimizer, the losses and the step sizes of the same loop without Accelerate."""

    def objective(net, images, labels, seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is not None):
            logits = net(images)
        return cross_entropy(logits.float(), labels)  # Accelerate gives the outputs back in float32

    return trainer_problems.by_hand(kind, steps, objective, clip)


def seeded(number, parts):
    """The parts of a step that begins with the random numbers of this batch."""
    return [(*parts[0], number), *parts[1:]]


def whole_steps(digits, accumulate):
    parts = [(*batch, number) for number, batch in enumerate(data(digits))]
    return [parts[i : i + accumulate] for i in range(0, BATCHES, accumulate)]


@pytest.mark.parametrize(
    ("accumulate", "precision", "clip"), [(1, None, None), (4, None, 0.25), (2, "bf16", 0.25), (1, "bf16", None)]
)
def test_whole_batches_are_the_gradients_of_one_step(digits, assert_same, accumulate, precision, clip):
    run = Run(digits, "whole", accumulate, clip, mixed_precision=precision or "no")
    run.train()
    net, opt, _, step_sizes = by_hand("whole", whole_steps(digits, accumulate), precision, clip)
    assert_same(run.accelerator.unwrap_model(run.model), run.opt, net, opt)
    steps = BATCHES // accumulate
    assert run.opt.diagnostics()["gradients"] == max(accumulate, 2)
    assert run.opt.diagnostics()["updates"] == (steps if accumulate > 1 else steps // 2)
    assert [row["step_size"] for row in run.monitor.history] == step_sizes
    assert len(step_sizes) == steps


@pytest.mark.parametrize(("kind", "precision"), [("free", None), ("free", "bf16"), ("base", "bf16")])
def test_every_batch_is_split_into_the_two_gradients_of_a_step(digits, assert_same, kind, precision):
    """The last batch has five samples, which count as five."""
    samples = (BATCHES - 1) * BATCH + 5
    run = Run(digits, kind, samples=samples, mixed_precision=precision or "no")
    losses = run.train()
    steps = [seeded(i, halves(batch)) for i, batch in enumerate(data(digits, samples))]
    net, opt, expected, _ = by_hand(kind, steps, precision)
    assert_same(run.accelerator.unwrap_model(run.model), run.opt, net, opt)
    assert losses == expected
    assert run.opt.diagnostics()["gradients"] == 2
    assert run.opt.diagnostics()["updates"] == BATCHES
    assert [row["updates"] for row in run.monitor.history] == list(range(1, BATCHES + 1))


@pytest.mark.parametrize("kind", ["free", "base"])
def test_accumulated_batches_are_not_split(digits, assert_same, kind):
    """Seven batches by two: an epoch ends with a single one, which is split, and counts as it should."""
    run = Run(digits, kind, accumulate=2, samples=7 * BATCH)
    losses = run.train()
    batches = list(data(digits, 7 * BATCH))
    steps = [seeded(i + 1, batches[i : i + 2]) for i in (0, 2, 4)]
    net, opt, expected, _ = by_hand(kind, [*steps, seeded(6, halves(batches[6]))])
    assert_same(run.accelerator.unwrap_model(run.model), run.opt, net, opt)
    assert losses == [None, expected[0], None, expected[1], None, expected[2], expected[3]]
    assert run.opt.diagnostics()["gradients"] == 2


@pytest.mark.parametrize(("kind", "inside"), [("free", False), ("base", False), ("free", True)])
def test_the_saved_model_is_the_average_and_the_loaded_one_goes_on_from_the_iterate(tmp_path, digits, kind, inside):
    """That it goes on to the last bit: ``test_resumed_training.py``."""
    run, resumed = Run(digits, kind), Run(digits, kind)
    run.train(stop=5)
    iterate = run.weight
    with run.opt.averaged():
        average = run.weight
    assert not torch.equal(iterate, average)
    with run.averaged if inside else contextlib.nullcontext():
        assert torch.equal(run.weight, average) == inside
        run.accelerator.save_state(tmp_path / "stopped")
        if inside:
            run.accelerator.save_model(run.model, tmp_path)
            assert torch.equal(load_file(tmp_path / "model.safetensors")["0.weight"], average)
    assert torch.equal(load_file(tmp_path / "stopped" / "model.safetensors")["0.weight"], average)
    resumed.accelerator.load_state(tmp_path / "stopped")
    assert torch.equal(resumed.weight, iterate)
    assert torch.equal(run.weight, iterate)


def test_the_trackers_have_the_learned_step_size(tmp_path, digits):
    config = ProjectConfiguration(project_dir=str(tmp_path), logging_dir=str(tmp_path))
    run = Run(digits, "whole", 2, every=2, log_with="tensorboard", project_config=config)
    run.accelerator.init_trackers("digits")
    run.train()
    run.accelerator.end_training()
    board = EventAccumulator(str(tmp_path / "digits")).Reload()
    _, opt, _, step_sizes = by_hand("whole", whole_steps(digits, 2))
    shown = [(event.step, event.value) for event in board.Scalars("sgdol/step_size")]
    assert [step for step, _ in shown] == [2, 4, 6]  # updates, not batches
    assert [value for _, value in shown] == pytest.approx(step_sizes[1::2], rel=1e-6)  # float32 there
    for name in ("signal_to_noise", "noise_scale", "skipped", "gradients"):
        last = board.Scalars(f"sgdol/{name}")[-1]
        assert (last.step, last.value) == (6, pytest.approx(opt.diagnostics()[name], rel=1e-6))
    (line,) = sgdol.plot(run.monitor).axes[0].lines
    assert list(line.get_ydata()) == step_sizes[1::2]


def test_a_model_that_prepare_has_moved_is_still_watched(digits):
    """As when it goes to another device: its data are replaced, and so are the nodes that accumulate its gradients."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build()
    opt = make("whole", model.parameters())
    model.double()
    prepared = accelerator.prepare(opt)
    for images, labels in zip(digits[0][:64].split(16), digits[1][:64].split(16), strict=True):
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(images.double()), labels))
            prepared.step()
            prepared.zero_grad()
    assert opt.diagnostics()["updates"] == 2
    assert opt.diagnostics()["gradients"] == 2


def test_what_cannot_be_is_said_in_a_sentence():
    accelerator = Accelerator(cpu=True)
    net = build()
    model, opt = accelerator.prepare(net, SGDOL(net.parameters(), lr=0.5))
    plain = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    given = r"must be an SGDOL, or a trainer's wrapper around one, got accelerate\."
    prepared = "optimizer must be an SGDOL or SGDOLFree, as prepared, got AcceleratedOptimi"
    parts = "parts must be a whole number of gradients, at least 2, got 1"
    for call, error, message in (
        (
            lambda: AveragedWeights(accelerator, model, opt),
            ValueError,
            "needs averages: give it an SGDOLFree, or an SGDOL",
        ),
        (lambda: Microbatches(accelerator, model, opt, parts=1), ValueError, parts),
        (lambda: Microbatches(accelerator, model, plain), TypeError, prepared),
        (lambda: StepSizeMonitor(accelerator, every=1)(plain), TypeError, given),
    ):
        with pytest.raises(error, match=message):
            call()
