"""Lightning trains as a loop by hand does, to the last bit: with whole batches, and with batches that are split."""

import csv
import warnings

import pytest
import torch
import trainer_problems
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.nn.functional import cross_entropy
from trainer_problems import BATCHES, Loader, build, halves, make, step_by_hand

import sgdol
from sgdol import SGDOL, SGDOLFree
from sgdol.torch import backward
from sgdol.trainers.lightning import AveragedWeights, Microbatches, StepSizeMonitor

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning",  # Lightning's, of torch
    "ignore:SGDOL got one backward",  # pairs of batches are among what is tested
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
)


class Classifier(LightningModule):
    """Its batches stay "whole", or are split, for SGDOLFree or SGDOL with averages."""

    def __init__(self, kind="free", manual=False, as_dict=False):
        super().__init__()
        self.net, self.kind, self.as_dict = build(), kind, as_dict
        self.validated, self.logged = [], []
        self.automatic_optimization = not manual

    def training_step(self, batch, index):
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        if not self.automatic_optimization:
            opt = self.optimizers()
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
        elif self.kind != "whole":
            self.log("loss", loss, on_step=True)
        return {"loss": loss, "size": len(labels)} if self.as_dict else loss

    def on_train_batch_end(self, outputs, batch, index):
        self.logged.append(self.trainer.callback_metrics.get("loss"))

    def validation_step(self, batch, index):
        self.validated.append([p.detach().clone() for p in self.parameters()])

    def configure_optimizers(self):
        return make(self.kind, self.parameters())


def trainer(tmp_path, callbacks=(), **options) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    saved = {"enable_checkpointing": False, "default_root_dir": tmp_path, "callbacks": list(callbacks)}
    return Trainer(**{**quiet, **saved, "max_epochs": 1, **options})


def fitted(tmp_path, model, loader, callbacks=None, validation=None, **options) -> Trainer:
    if callbacks is None:
        callbacks = [] if model.kind == "whole" else [Microbatches()]
    fit = trainer(tmp_path, callbacks, **options)
    torch.manual_seed(1)
    fit.fit(model, loader, validation)
    return fit


def by_hand(kind, steps, precision=None, clip=None):
    """The model, the optimizer and the step sizes of the same loop without Lightning."""

    def objective(net, images, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is not None, cache_enabled=False):
            return cross_entropy(net(images), labels)

    torch.manual_seed(1)
    net, opt, _, step_sizes = trainer_problems.by_hand(kind, steps, objective, clip)
    return net, opt, step_sizes


def by_so_many(batches, accumulate):
    return [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]


@pytest.mark.parametrize(
    ("accumulate", "precision", "clip"),
    [(1, None, None), (4, None, 0.5), (2, "bf16-mixed", 0.5), (1, "bf16-mixed", None)],
)
def test_whole_batches_are_the_gradients_of_one_step(tmp_path, digits, assert_same, accumulate, precision, clip):
    """Each passes through the model once, or BatchNorm's statistics would move twice."""
    model, loader = Classifier("whole"), Loader(digits)
    precise = {"precision": precision or "32-true", "gradient_clip_val": clip}
    fit = fitted(tmp_path, model, loader, max_epochs=2, accumulate_grad_batches=accumulate, **precise)
    steps = by_so_many(2 * loader.batches, accumulate)
    net, opt, _ = by_hand("whole", steps, precision, clip)
    assert_same(model.net, fit.optimizers[0], net, opt)
    found = opt.diagnostics()
    assert found["gradients"] == max(accumulate, 2)
    assert found["updates"] == (len(steps) if accumulate > 1 else len(steps) // 2)
    assert 0 < found["step_size"][0] < 0.4, "it has seen no noise: every batch was taken twice"


@pytest.mark.parametrize("kind", [Precision, MixedPrecision])
def test_a_precision_plugin_of_the_users_own_is_recognised_too(tmp_path, digits, kind):
    class Mine(kind):
        pass

    plugin = Mine() if kind is Precision else Mine("bf16-mixed", "cpu")
    model = Classifier("whole")
    fitted(tmp_path, model, Loader(digits), plugins=[plugin])
    assert model.net[1].num_batches_tracked == BATCHES


def test_manual_optimization_makes_pairs_of_consecutive_batches(tmp_path, digits, assert_same):
    """Lightning gives an empty closure to step(): it must not count as the second gradient."""
    model, loader = Classifier("whole", manual=True), Loader(digits)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="SGDOL was given the same gradient twice")
        fit = fitted(tmp_path, model, loader)
    net, opt, _ = by_hand("whole", by_so_many(loader.batches, 1))
    assert_same(model.net, fit.optimizers[0], net, opt)


def test_the_learned_step_size_is_in_the_trainers_log(tmp_path, digits):
    logger, monitor, loader = CSVLogger(tmp_path), StepSizeMonitor(), Loader(digits)
    options = {"logger": logger, "log_every_n_steps": 4, "callbacks": [monitor]}
    fitted(tmp_path, Classifier("whole"), loader, max_epochs=2, accumulate_grad_batches=2, **options)
    logger.save()
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    _, opt, step_sizes = by_hand("whole", by_so_many(2 * loader.batches, 2))
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


@pytest.mark.parametrize(("kind", "precision"), [("free", None), ("free", "bf16-mixed"), ("base", "bf16-mixed")])
def test_every_batch_is_split_into_the_two_gradients_of_a_step(tmp_path, digits, assert_same, kind, precision):
    model, loader, monitor = Classifier(kind), Loader(digits), StepSizeMonitor(every=4)
    callbacks = [Microbatches(), monitor]
    fit = fitted(tmp_path, model, loader, callbacks, max_epochs=2, precision=precision or "32-true")
    net, opt, step_sizes = by_hand(kind, 2 * list(map(halves, loader.batches)), precision)
    assert_same(model.net, fit.optimizers[0], net, opt)
    assert opt.diagnostics()["updates"] == fit.global_step == 2 * BATCHES
    assert [(row["gradients"], row["step_size"]) for row in monitor.history] == [(2, eta) for eta in step_sizes[3::4]]
    assert "training_step" not in vars(model)
    assert "optimizer_zero_grad" not in vars(model)


@pytest.mark.parametrize("scheduled", [False, True])
def test_clipping_is_that_of_a_loop_by_hand_and_is_not_repeated_in_a_look_back(
    tmp_path, digits, assert_same, scheduled
):
    class Scheduled(Classifier):
        def configure_optimizers(self):
            opt = super().configure_optimizers()
            return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)] if scheduled else []

    model, loader = Scheduled(), Loader(digits)
    fit = fitted(tmp_path, model, loader, max_epochs=2, gradient_clip_val=0.5)
    torch.manual_seed(1)
    net = build()
    opt, clipped = SGDOLFree(net.parameters()), 0
    for epoch in range(2):
        for images, labels in loader.batches:
            opt.param_groups[0]["lr"] = 0.5**epoch if scheduled else 1.0
            backward(lambda images, labels: cross_entropy(net(images), labels), images, labels)
            clipped += bool(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5) > 0.5)
            opt.step()
            opt.zero_grad()
    assert 5 < clipped <= 2 * BATCHES
    assert opt.diagnostics()["evaluations"] > 2 * BATCHES
    opt.param_groups[0].update({k: value for k, value in fit.optimizers[0].param_groups[0].items() if "lr" in k})
    assert_same(model.net, fit.optimizers[0], net, opt)
    assert "optimizer_step" not in vars(model)


def test_a_last_batch_of_an_odd_size_is_weighted_by_samples(tmp_path, digits, assert_same):
    """Of a model that returns a dictionary."""
    model, loader = Classifier(as_dict=True), Loader(digits)
    loader.batches = [(digits[0][start:stop], digits[1][start:stop]) for start, stop in ((0, 16), (16, 21))]
    fit = fitted(tmp_path, model, loader)
    net, opt, _ = by_hand("free", map(halves, loader.batches))
    assert_same(model.net, fit.optimizers[0], net, opt)


def test_accumulated_batches_are_not_split(tmp_path, digits, assert_same):
    """Seven batches by two: an epoch ends with a single one, which is split, and counts as it should."""
    model, loader = Classifier(), Loader(digits, 7)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*training_step. returned")
        fit = fitted(tmp_path, model, loader, max_epochs=2, accumulate_grad_batches=2)
    batches = loader.batches
    net, opt, _ = by_hand("free", 2 * [batches[:2], batches[2:4], batches[4:6], halves(batches[6])])
    assert_same(model.net, fit.optimizers[0], net, opt)
    assert fit.global_step == opt.diagnostics()["updates"] == 8


def test_what_is_logged_is_the_loss_where_the_step_started(tmp_path, digits):
    """SGDOLFree evaluates some batches at two points; the second is nobody's business."""
    model, loader = Classifier(), Loader(digits)
    fit = fitted(tmp_path, model, loader)
    assert fit.optimizers[0].diagnostics()["evaluations"] > BATCHES
    torch.manual_seed(1)
    net = build()
    opt = SGDOLFree(net.parameters())
    for batch, logged in zip(loader.batches, model.logged, strict=True):
        seen = []

        def objective(images, labels, seen=seen):
            seen.append(cross_entropy(net(images), labels))
            return seen[-1]

        step_by_hand("free", opt, halves(batch), [0.5, 0.5], objective)
        assert torch.equal(logged, seen[1])


@pytest.mark.parametrize(("kind", "weights_only"), [("free", False), ("base", True)])
def test_validation_checkpoints_and_the_end_are_at_the_average(tmp_path, digits, kind, weights_only):
    loader, model = Loader(digits), Classifier(kind)
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, save_weights_only=weights_only)
    callbacks, validation = [Microbatches(), AveragedWeights(), saving], [torch.zeros(1)]
    fitted(tmp_path, model, loader, callbacks, validation, max_epochs=2, enable_checkpointing=True)
    net, opt, _ = by_hand(kind, 2 * list(map(halves, loader.batches)))
    iterate = [p.detach().clone() for p in net.parameters()]
    with opt.averaged():
        average = [p.detach().clone() for p in net.parameters()]
    assert not torch.equal(average[0], iterate[0])
    for found in (model.validated[-1], list(model.parameters())):
        assert all(torch.equal(p, q) for p, q in zip(found, average, strict=True))
    saved = torch.load(saving.best_model_path, weights_only=True)
    assert torch.equal(saved["state_dict"]["net.0.weight"], average[0])
    assert ("sgdol_iterate" in saved) == (not weights_only)
    if not weights_only:
        assert torch.equal(saved["sgdol_iterate"]["net.0.weight"], iterate[0])
    other = Classifier(kind)
    trainer(tmp_path, [AveragedWeights()]).validate(other, validation, saving.best_model_path)
    assert torch.equal(other.validated[-1][0], average[0])
    assert not any(name.startswith("on_") for name in vars(model))


def test_an_exception_in_validation_leaves_the_weights_of_the_training(tmp_path, digits):
    class Fails(Classifier):
        def validation_step(self, batch, index):
            if self.trainer.global_step:
                raise ArithmeticError("in validation")

    model, loader = Fails(), Loader(digits)
    with pytest.raises(ArithmeticError):
        fitted(tmp_path, model, loader, [AveragedWeights(), Microbatches()], [torch.zeros(1)])
    net, _, _ = by_hand("free", map(halves, loader.batches))
    assert torch.equal(model.net[0].weight, net[0].weight)
    assert "training_step" not in vars(model)


class Plain(Classifier):
    def configure_optimizers(self):
        return SGDOL(self.parameters(), lr=0.5)


class WithoutSGDOL(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Skips(Classifier):
    def training_step(self, batch, index):
        return None


BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("kind", "callback", "options", "error", "message"),
    [
        (Classifier, Microbatches, BY_VALUE, RuntimeError, "clip_grad_norm_ of all parameters at once is right"),
        (Classifier, None, {}, RuntimeError, "at least two independent gradients per step"),
        (Plain, AveragedWeights, {}, ValueError, "AveragedWeights needs averages, got averaging=None"),
        (WithoutSGDOL, StepSizeMonitor, {}, TypeError, "needs one SGDOL among the optimizers of .*, which are: SGD"),
        (Skips, Microbatches, {}, TypeError, "must return the mean loss of each part of a batch, got None"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(tmp_path, digits, kind, callback, options, error, message):
    with pytest.raises(error, match=message):
        fitted(tmp_path, kind(), Loader(digits), [callback()] if callback else [], **options)


def test_microbatches_are_at_least_two():
    with pytest.raises(ValueError, match="parts must be a whole number of gradients, at least 2, got 1"):
        Microbatches(parts=1)
