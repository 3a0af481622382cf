"""LightningCLI takes the optimizers and the callbacks by their import paths."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

import sgdol

pytest.importorskip("jsonargparse")
pytestmark = pytest.mark.filterwarnings(
    "ignore:LightningCLI's args parameter is intended",
    "ignore::DeprecationWarning",  # jsonargparse's, of what Lightning calls
    "ignore:.*LeafSpec:FutureWarning",  # Lightning's, of torch
)

QUIET = (
    "--trainer.max_epochs=30", "--trainer.accelerator=cpu", "--trainer.logger=false",
    "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
)  # fmt: skip
CALLBACKS = (
    "--trainer.callbacks+=sgdol.trainers.lightning.Microbatches",
    "--trainer.callbacks+=sgdol.trainers.lightning.AveragedWeights",
)


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def train_dataloader(self):
        x = torch.randn(64, 4)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (("--optimizer", "sgdol.SGDOLFree"), sgdol.SGDOLFree),
        (("--optimizer", "sgdol.SGDOL", "--optimizer.lr=0.05", "--optimizer.averaging=8"), sgdol.SGDOL),
    ],
    ids=["free", "sgdol"],
)
def test_an_optimizer_by_its_name_trains(options, kind):
    from lightning.pytorch.cli import LightningCLI

    arguments = ["fit", *options, *CALLBACKS, *QUIET]
    cli = LightningCLI(Line, args=arguments, save_config_callback=None, seed_everything_default=0)
    (optimizer,) = cli.trainer.optimizers
    assert isinstance(optimizer, kind)
    assert optimizer.diagnostics()["gradients"] == 2
    assert (cli.model.net.weight - 1).abs().max() < 0.1
