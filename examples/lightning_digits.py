"""Lightning: return SGDOL or SGDOLFree from configure_optimizers, and add callbacks.

SGDOL: accumulate_grad_batches=2 gives two independent gradients per update, and StepSizeMonitor logs what is learned.
SGDOLFree has no learning rate: Microbatches splits each batch for it, and AveragedWeights leaves its average behind.
"""

import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from sgdol import SGDOL, SGDOLFree
from sgdol.trainers.lightning import AveragedWeights, Microbatches, StepSizeMonitor


class Classifier(LightningModule):
    """A small network with BatchNorm; each batch passes through it once."""

    def __init__(self, free: bool = False) -> None:
        super().__init__()
        self.free = free
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The loss of a batch."""
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer as everywhere else."""
        return SGDOLFree(self.parameters()) if self.free else SGDOL(self.parameters(), lr=0.05)


def accuracy(model: Classifier) -> float:
    """On the images that were not trained on."""
    model.eval()
    with torch.no_grad():
        return (model.net(images[test]).argmax(1) == labels[test]).float().mean().item()


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
print(f"test accuracy {accuracy(model):.3f}")

free = Classifier(free=True)
trainer = Trainer(max_epochs=5, logger=False, callbacks=[Microbatches(), AveragedWeights()], **options)  # type: ignore[arg-type]
trainer.fit(free, loader)  # trainer.save_checkpoint(...) saves the average too, and fit(ckpt_path=...) resumes exactly
print(f"without a learning rate: test accuracy {accuracy(free):.3f}")
