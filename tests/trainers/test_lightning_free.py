"""Lightning with SGDOLFree, with batches that are split, and at the average: as a loop by hand, to the last bit."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy
from trainer_problems import BATCHES, Loader, build, by_samples, make, step_by_hand

import sgdol
from sgdol import SGDOL, SGDOLFree
from sgdol.torch import backward
from sgdol.trainers.lightning import AveragedWeights, Microbatches, StepSizeMonitor

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning",  # Lightning's, of torch
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
)


class Classifier(LightningModule):
    def __init__(self, kind="free", as_dict=False):
        super().__init__()
        self.net, self.kind, self.as_dict = build(), kind, as_dict
        self.validated, self.logged = [], []

    def training_step(self, batch, index):
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=True)
        return {"loss": loss, "size": len(labels)} if self.as_dict else loss

    def on_train_batch_end(self, outputs, batch, index):
        self.logged.append(self.trainer.callback_metrics.get("loss"))

    def validation_step(self, batch, index):
        self.validated.append([p.detach().clone() for p in self.parameters()])

    def configure_optimizers(self):
        return make(self.kind, self.parameters())


def trainer(tmp_path, **options) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    saved = {"enable_checkpointing": False, "default_root_dir": tmp_path, "callbacks": [Microbatches()]}
    return Trainer(**{**quiet, **saved, **options})


def by_hand(kind, steps, precision=None):
    """The loop that is promised, written out: each step has its parts. Returns the model and the optimizer."""
    net = build()
    opt = make(kind, net.parameters())

    def objective(images, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is not None, cache_enabled=False):
            return cross_entropy(net(images), labels)

    for parts in steps:
        step_by_hand(kind, opt, parts, by_samples(parts), objective)
    return net, opt


def halves(batches):
    return [list(zip(images.chunk(2), labels.chunk(2), strict=True)) for images, labels in batches]


@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
@pytest.mark.parametrize("kind", ["free", "base"])
def test_every_batch_is_a_step_with_two_gradients(tmp_path, digits, assert_same, kind, precision):
    model, loader = Classifier(kind), Loader(digits)
    fit = trainer(tmp_path, max_epochs=2, precision=precision or "32-true")
    torch.manual_seed(1)
    fit.fit(model, loader)
    torch.manual_seed(1)
    net, opt = by_hand(kind, 2 * halves(loader.batches), precision)
    assert_same(model.net, fit.optimizers[0], net, opt)
    assert opt.diagnostics()["updates"] == fit.global_step == 2 * BATCHES
    assert opt.diagnostics()["gradients"] == 2
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
    fit = trainer(tmp_path, max_epochs=2, gradient_clip_val=0.5)
    torch.manual_seed(1)
    fit.fit(model, loader)
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
    opt.param_groups[0].update(
        {name: value for name, value in fit.optimizers[0].param_groups[0].items() if "lr" in name}
    )
    assert_same(model.net, fit.optimizers[0], net, opt)
    assert "optimizer_step" not in vars(model)


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_last_batch_of_an_odd_size_is_weighted_by_samples(tmp_path, digits, assert_same, as_dict):
    images, labels = digits[0][:24], digits[1][:24]
    batches = [(images[:16], labels[:16]), (images[16:21], labels[16:21])]
    model, loader = Classifier(as_dict=as_dict), Loader(digits)
    loader.batches = batches
    fit = trainer(tmp_path, max_epochs=1)
    torch.manual_seed(1)
    fit.fit(model, loader)
    torch.manual_seed(1)
    odd = [(images[16:18], labels[16:18]), (images[18:21], labels[18:21])]
    net, opt = by_hand("free", [*halves(batches[:1]), odd])
    assert_same(model.net, fit.optimizers[0], net, opt)


def test_accumulated_batches_are_the_gradients_of_one_step(tmp_path, digits, assert_same):
    """Seven batches by two: an epoch ends with a single one, which is split, and counts as it should."""
    model, loader = Classifier(), Loader(digits, 7)
    fit = trainer(tmp_path, max_epochs=2, accumulate_grad_batches=2)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*training_step. returned")
        fit.fit(model, loader)
    torch.manual_seed(1)
    batches = loader.batches
    net, opt = by_hand("free", 2 * [batches[:2], batches[2:4], batches[4:6], *halves(batches[6:])])
    assert_same(model.net, fit.optimizers[0], net, opt)
    assert fit.global_step == opt.diagnostics()["updates"] == 8


def test_what_is_logged_is_the_loss_where_the_step_started(tmp_path, digits):
    """SGDOLFree evaluates some batches at two points; the second is nobody's business."""
    model, loader = Classifier(), Loader(digits)
    fit = trainer(tmp_path, max_epochs=1)
    torch.manual_seed(1)
    fit.fit(model, loader)
    evaluations = fit.optimizers[0].diagnostics()["evaluations"]
    assert evaluations > BATCHES
    net = build()
    opt = SGDOLFree(net.parameters())
    torch.manual_seed(1)
    for parts, logged in zip(halves(loader.batches), model.logged, strict=True):
        seen = []

        def closure(parts=parts, seen=seen):
            losses = [cross_entropy(net(images), labels) for images, labels in parts]
            for loss in losses:
                (loss / 2).backward()
            seen.append(losses[-1].detach())
            return sum(losses) / 2

        opt.step(closure)
        assert torch.equal(logged, seen[0])


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("kind", ["free", "base"])
def test_validation_checkpoints_and_the_end_are_at_the_average(tmp_path, digits, kind, weights_only):
    loader = Loader(digits)
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, save_weights_only=weights_only)
    model = Classifier(kind)
    fit = trainer(
        tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[Microbatches(), AveragedWeights(), saving]
    )
    torch.manual_seed(1)
    fit.fit(model, loader, [torch.zeros(1)])
    torch.manual_seed(1)
    net, opt = by_hand(kind, 2 * halves(loader.batches))
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
    trainer(tmp_path, callbacks=[AveragedWeights()]).validate(other, [torch.zeros(1)], saving.best_model_path)
    assert torch.equal(other.validated[-1][0], average[0])
    assert not any(name.startswith("on_") for name in vars(model))


def test_an_exception_in_validation_leaves_the_weights_of_the_training(tmp_path, digits):
    class Fails(Classifier):
        def validation_step(self, batch, index):
            if self.trainer.global_step:
                raise ArithmeticError("in validation")

    model, loader = Fails(), Loader(digits)
    fit = trainer(tmp_path, max_epochs=1, callbacks=[AveragedWeights(), Microbatches()])
    torch.manual_seed(1)
    with pytest.raises(ArithmeticError):
        fit.fit(model, loader, [torch.zeros(1)])
    torch.manual_seed(1)
    net, _ = by_hand("free", halves(loader.batches))
    assert torch.equal(model.net[0].weight, net[0].weight)
    assert "training_step" not in vars(model)


def test_the_monitor_shows_what_sgdolfree_learns(tmp_path, digits):
    monitor = StepSizeMonitor(every=4)
    fit = trainer(tmp_path, max_epochs=1, callbacks=[Microbatches(), monitor])
    fit.fit(Classifier(), Loader(digits))
    assert [row["gradients"] for row in monitor.history] == [2, 2, 2]
    panel = next(ax for ax in sgdol.plot(monitor).axes if "eta" in ax.get_ylabel())
    line = panel.lines[0]
    assert line.get_ydata()[-1] == fit.optimizers[0].diagnostics()["step_size"][0]


def test_what_sgdolfree_cannot_is_said_in_a_sentence(tmp_path, digits):
    with pytest.raises(RuntimeError, match=r"different factors .* clip_grad_norm_ of all parameters at once is right"):
        trainer(tmp_path, max_epochs=1, gradient_clip_val=0.01, gradient_clip_algorithm="value").fit(
            Classifier(), Loader(digits)
        )
    with pytest.raises(RuntimeError, match="at least two independent gradients per step"):
        trainer(tmp_path, max_epochs=1, callbacks=[]).fit(Classifier(), Loader(digits))
    with pytest.raises(ValueError, match="parts must be a whole number of gradients, at least 2, got 1"):
        Microbatches(parts=1)

    class Plain(Classifier):
        def configure_optimizers(self):
            return SGDOL(self.parameters(), lr=0.5)

    with pytest.raises(ValueError, match="AveragedWeights needs averages, got averaging=None"):
        trainer(tmp_path, max_epochs=1, callbacks=[AveragedWeights()]).fit(Plain(), Loader(digits))

    class Skips(Classifier):
        def training_step(self, batch, index):
            return None

    with pytest.raises(TypeError, match="must return the mean loss of each part of a batch, got None"):
        trainer(tmp_path, max_epochs=1).fit(Skips(), Loader(digits))
