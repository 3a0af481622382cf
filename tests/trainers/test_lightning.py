"""Lightning trains with SGDOL as a loop by hand does: the same bits, with and without accumulation, and resumed."""

import csv
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.nn.functional import cross_entropy
from trainer_problems import BATCHES, Loader, noise_averse

import sgdol
from sgdol import SGDOL
from sgdol.trainers.lightning import StepSizeMonitor

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning",  # Lightning's, of torch
    "ignore:SGDOL got one backward",  # pairs of batches are among what is tested
)


def build() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
    )


class Classifier(LightningModule):
    def __init__(self, manual=False, **options):
        super().__init__()
        self.net = build()
        self.options = options
        self.seen = 0
        self.automatic_optimization = not manual

    def training_step(self, batch, index):
        images, labels = batch
        self.seen += 1
        loss = cross_entropy(self.net(images), labels)
        if not self.automatic_optimization:
            opt = self.optimizers()
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
        return loss

    def configure_optimizers(self) -> SGDOL:
        return noise_averse(self.parameters(), **self.options)


def trainer(tmp_path, **options) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        **{**quiet, "accelerator": "cpu", "enable_checkpointing": False, "default_root_dir": tmp_path, **options}
    )


def by_hand(batches, updates_after, accumulate=1, precision=None, clip=None):
    """The loop that Lightning promises to run, written out. Returns the model, the optimizer and each step size."""
    net = build()
    opt = noise_averse(net.parameters())
    step_sizes, norms = [], []
    for step in range(updates_after):
        for images, labels in batches[step * accumulate : (step + 1) * accumulate]:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is not None, cache_enabled=False):
                loss = cross_entropy(net(images), labels)
            (loss / accumulate).backward()
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), clip).item())
        opt.step()
        opt.zero_grad()
        step_sizes.append(opt.diagnostics()["step_size"][0])
    assert clip is None or max(norms) > clip, "nothing was clipped"
    return net, opt, step_sizes


@pytest.mark.parametrize(
    ("accumulate", "precision", "clip"),
    [(1, None, None), (2, None, None), (4, None, 0.5), (2, "bf16-mixed", 0.5), (1, "bf16-mixed", None)],
)
def test_lightning_takes_the_same_steps_as_a_loop_by_hand(tmp_path, digits, assert_same, accumulate, precision, clip):
    model, loader = Classifier(), Loader(digits)
    fit = trainer(
        tmp_path,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        precision=precision or "32-true",
        gradient_clip_val=clip,
    )
    fit.fit(model, loader)
    steps = 2 * BATCHES // accumulate
    net, opt, _ = by_hand(2 * loader.batches, steps, accumulate, precision, clip)
    assert_same(model.net, fit.optimizers[0], net, opt)
    found = opt.diagnostics()
    assert found["gradients"] == max(accumulate, 2)
    assert found["updates"] == (steps if accumulate > 1 else steps // 2)
    assert 0 < found["step_size"][0] < 0.4, "it has seen no noise: every batch was taken twice"


def test_each_batch_passes_through_the_model_once(tmp_path, digits):
    """Lightning's closure repeats its batch; calling it twice would also move BatchNorm's statistics twice."""
    model = Classifier()
    trainer(tmp_path, max_epochs=1).fit(model, Loader(digits))
    assert model.seen == BATCHES
    assert model.net[1].num_batches_tracked == BATCHES


@pytest.mark.parametrize("kind", [Precision, MixedPrecision])
def test_a_precision_plugin_of_the_users_own_is_recognised_too(tmp_path, digits, kind):
    class Mine(kind):
        pass

    plugin = Mine() if kind is Precision else Mine("bf16-mixed", "cpu")
    model = Classifier()
    trainer(tmp_path, max_epochs=1, plugins=[plugin]).fit(model, Loader(digits))
    assert model.seen == BATCHES


def test_manual_optimization_makes_pairs_of_consecutive_batches(tmp_path, digits, assert_same):
    """Lightning gives an empty closure to step(): it must not count as the second gradient."""
    model, loader = Classifier(manual=True), Loader(digits)
    fit = trainer(tmp_path, max_epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="SGDOL was given the same gradient twice")
        fit.fit(model, loader)
    net, opt, _ = by_hand(loader.batches, BATCHES)
    assert_same(model.net, fit.optimizers[0], net, opt)


def test_the_learned_step_size_is_in_the_trainers_log(tmp_path, digits):
    logger, monitor, loader = CSVLogger(tmp_path), StepSizeMonitor(), Loader(digits)
    fit = trainer(
        tmp_path, max_epochs=2, accumulate_grad_batches=2, logger=logger, log_every_n_steps=4, callbacks=[monitor]
    )
    fit.fit(Classifier(), loader)
    logger.save()
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    _, opt, step_sizes = by_hand(2 * loader.batches, 12, accumulate=2)
    assert [int(row["step"]) for row in rows] == [3, 7, 11]  # Lightning counts from 0
    assert [float(row["sgdol/step_size"]) for row in rows] == step_sizes[3::4]
    assert [float(row["sgdol/gradients"]) for row in rows] == [2, 2, 2]
    found = opt.diagnostics()
    for name in ("signal_to_noise", "noise_scale", "skipped", "updates"):
        assert float(rows[-1][f"sgdol/{name}"]) == found[name]
    assert [row["step_size"] for row in monitor.history] == step_sizes[3::4]
    for history in (monitor, rows):
        (line,) = sgdol.plot(history).axes[0].lines
        assert list(line.get_ydata()) == step_sizes[3::4]


def test_the_monitor_says_that_there_is_no_sgdol(tmp_path, digits):
    class Plain(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(TypeError, match="needs one SGDOL among the optimizers of the Trainer, which are: SGD"):
        trainer(tmp_path, max_epochs=1, callbacks=[StepSizeMonitor()]).fit(Plain(), Loader(digits))
