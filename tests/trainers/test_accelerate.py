"""Accelerate trains with SGDOL as a loop by hand does: the same bits, also resumed."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from trainer_problems import noise_averse

import sgdol
from sgdol.trainers.accelerate import StepSizeMonitor

pytestmark = pytest.mark.filterwarnings("ignore:SGDOL got one backward")  # pairs of batches are tested

BATCHES, BATCH = 12, 16


def build() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
    )


def data(digits) -> DataLoader:
    images, labels = digits
    return DataLoader(TensorDataset(images[: BATCHES * BATCH], labels[: BATCHES * BATCH]), batch_size=BATCH)


class Run:
    """A training program as Accelerate's documentation has it."""

    def __init__(self, digits, accumulate=1, clip=None, every=1, **options):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
        model = build()
        self.opt = noise_averse(model.parameters())
        self.model, self.prepared, self.loader = self.accelerator.prepare(model, self.opt, data(digits))
        self.monitor = StepSizeMonitor(self.accelerator, every=every)
        self.clip = clip

    def train(self):
        for images, labels in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = cross_entropy(self.model(images), labels)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and self.clip is not None:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.prepared.step()
                self.prepared.zero_grad()
                self.monitor(self.prepared)


def by_hand(digits, accumulate, precision=None, clip=None):
    """The loop that Accelerate promises to run, written out."""
    net = build()
    opt = noise_averse(net.parameters())
    step_sizes = []
    for number, (images, labels) in enumerate(data(digits), start=1):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is not None):
            logits = net(images)
        loss = cross_entropy(logits.float(), labels)  # Accelerate gives the outputs back in float32
        (loss / accumulate).backward()
        if number % accumulate == 0:
            if clip is not None:
                assert torch.nn.utils.clip_grad_norm_(net.parameters(), clip) > clip, "nothing was clipped"
            opt.step()
            opt.zero_grad()
            step_sizes.append(opt.diagnostics()["step_size"][0])
    return net, opt, step_sizes


@pytest.mark.parametrize(
    ("accumulate", "precision", "clip"),
    [(1, None, None), (2, None, None), (3, None, 0.25), (2, "bf16", 0.25), (1, "bf16", None)],
)
def test_accelerate_takes_the_same_steps_as_a_loop_by_hand(digits, assert_same, accumulate, precision, clip):
    run = Run(digits, accumulate, clip, mixed_precision=precision or "no")
    run.train()
    net, opt, step_sizes = by_hand(digits, accumulate, precision, clip)
    assert_same(run.accelerator.unwrap_model(run.model), run.opt, net, opt)
    steps = BATCHES // accumulate
    assert run.opt.diagnostics()["gradients"] == max(accumulate, 2)
    assert run.opt.diagnostics()["updates"] == (steps if accumulate > 1 else steps // 2)
    assert [row["step_size"] for row in run.monitor.history] == step_sizes
    assert len(step_sizes) == steps


def test_the_trackers_have_the_learned_step_size(tmp_path, digits):
    config = ProjectConfiguration(project_dir=str(tmp_path), logging_dir=str(tmp_path))
    run = Run(digits, 2, every=2, log_with="tensorboard", project_config=config)
    run.accelerator.init_trackers("digits")
    run.train()
    run.accelerator.end_training()
    board = EventAccumulator(str(tmp_path / "digits")).Reload()
    shown = {
        name: [(event.step, event.value) for event in board.Scalars(f"sgdol/{name}")]
        for name in ("step_size", "signal_to_noise", "noise_scale", "skipped", "gradients")
    }
    _, opt, step_sizes = by_hand(digits, 2)
    assert [step for step, _ in shown["step_size"]] == [2, 4, 6]  # updates, not batches
    assert [value for _, value in shown["step_size"]] == pytest.approx(step_sizes[1::2], rel=1e-6)  # float32 there
    found = opt.diagnostics()
    for name in ("signal_to_noise", "noise_scale", "skipped", "gradients"):
        assert shown[name][-1] == (6, pytest.approx(found[name], rel=1e-6))
    (line,) = sgdol.plot(run.monitor).axes[0].lines
    assert list(line.get_ydata()) == step_sizes[1::2]


def test_a_model_that_prepare_has_moved_is_still_watched(digits):
    """As when it goes to another device: its data are replaced, and so are the nodes that accumulate its gradients."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build()
    opt = noise_averse(model.parameters())
    model.double()
    prepared = accelerator.prepare(opt)
    for images, labels in zip(digits[0][:64].split(16), digits[1][:64].split(16), strict=True):
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(images.double()), labels))
            prepared.step()
            prepared.zero_grad()
    assert opt.diagnostics()["updates"] == 2
    assert opt.diagnostics()["gradients"] == 2


def test_what_is_no_sgdol_is_refused(digits):
    accelerator = Accelerator(cpu=True)
    wrapped = accelerator.prepare(torch.optim.SGD(build().parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"must be an SGDOL, or a trainer's wrapper around one, got accelerate\."):
        StepSizeMonitor(accelerator, every=1)(wrapped)
