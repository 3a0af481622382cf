"""Lightning: return SGDOL from configure_optimizers, and log what it learns with a callback.

accumulate_grad_batches=2 gives two independent gradients per update. Without it two consecutive batches make an update.
"""

import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from sgdol import SGDOL
from sgdol.trainers.lightning import StepSizeMonitor


class Classifier(LightningModule):
    """A small network with BatchNorm; each batch passes through it once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The loss of a batch."""
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer as everywhere else."""
        return SGDOL(self.parameters(), lr=0.5)


seed_everything(0, verbose=False)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = torch.randperm(len(images)).split([1500, len(images) - 1500])
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=16, shuffle=True, drop_last=True)

folder = tempfile.mkdtemp()  # a place of your own, in earnest
monitor = StepSizeMonitor()
options = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "default_root_dir": folder,
}
trainer = Trainer(
    max_epochs=10,
    accumulate_grad_batches=2,
    limit_train_batches=92,  # an even number: no epoch ends with a single gradient
    gradient_clip_val=5.0,
    log_every_n_steps=46,
    logger=CSVLogger(folder),
    callbacks=[monitor],
    **options,  # type: ignore[arg-type]
)
model = Classifier()
trainer.fit(model, loader)

for row in monitor.history:  # the same is in the logger's metrics.csv; sgdol.plot(monitor) draws it
    print(f"step {row['step']:3.0f}  step size {row['step_size']:.4f}  {row['gradients']:.0f} gradients per update")
model.eval()
accuracy = (model.net(images[test]).argmax(1) == labels[test]).float().mean()
print(f"test accuracy {accuracy:.3f}")
