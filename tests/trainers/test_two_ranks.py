"""Lightning and Accelerate on two ranks with gloo: k = ranks x accumulated batches, the same as one process."""

import sys

import pytest
from processes import output

COMMON = """
import torch
import torch.distributed as dist
from sgdol import SGDOL

torch.set_num_threads(1)
data = torch.randn(64, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

def build():
    torch.manual_seed(0)
    return torch.nn.Linear(5, 1).double()

def objective(net, batch):
    return (net(batch[:, :5]) - batch[:, 5:]).square().mean()

def compare(net, opt, seen, accumulate):
    every = [None, None]
    dist.all_gather_object(every, seen)
    hand = build()
    hand_opt = SGDOL(hand.parameters(), lr=0.1)
    for i in range(0, len(seen), accumulate):
        for rank in every:
            for batch in rank[i : i + accumulate]:
                (objective(hand, batch) / (2 * accumulate)).backward()
        hand_opt.step()
        hand_opt.zero_grad()
    found, expected = opt.diagnostics(), hand_opt.diagnostics()
    assert found["gradients"] == expected["gradients"] == 2 * accumulate, found
    assert found["updates"] == 8 // accumulate, found
    torch.testing.assert_close(torch.tensor(found["step_size"]), torch.tensor(expected["step_size"]))
    for p, q in zip(net.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
        every = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(every, p.detach())
        assert torch.equal(*every)
    print("same as one process")
"""

LIGHTNING = """
from lightning.pytorch import LightningModule, Trainer

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = build(), []

    def training_step(self, batch):
        self.seen.append(batch)
        return objective(self.net, batch)

    def configure_optimizers(self):
        return SGDOL(self.parameters(), lr=0.1)

for accumulate in (1, 2):
    model = Model()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, accumulate_grad_batches=accumulate, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, precision="64-true",
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    compare(model.net, trainer.optimizers[0], model.seen, accumulate)
"""

ACCELERATE = """
from accelerate import Accelerator
from accelerate.state import GradientState

for accumulate in (1, 2):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    net = build()
    opt = SGDOL(net.parameters(), lr=0.1)
    model, prepared, loader = accelerator.prepare(net, opt, torch.utils.data.DataLoader(data, batch_size=4))
    seen = []
    for batch in loader:
        seen.append(batch)
        with accelerator.accumulate(model):
            accelerator.backward(objective(model, batch))
            prepared.step()
            prepared.zero_grad()
    compare(net, opt, seen, accumulate)
    GradientState._reset_state()
"""

FREE = """
from sgdol import SGDOLFree

def compare_free(net, opt, seen, steps):
    every = [None, None]
    dist.all_gather_object(every, seen)
    hand = build()
    hand_opt = SGDOLFree(hand.parameters())
    for step in steps:
        def closure():
            losses = [objective(hand, rank[i]) / (2 * len(step)) for i in step for rank in every]
            for loss in losses:
                loss.backward()
            return sum(losses)
        hand_opt.step(closure)
    found, expected = opt.diagnostics(), hand_opt.diagnostics()
    assert found["gradients"] == expected["gradients"] == 2 * len(step), found
    assert found["updates"] == expected["updates"] == len(steps), found
    assert found["evaluations"] == expected["evaluations"], found
    with hand_opt.averaged():
        for p, q in zip(net.parameters(), hand.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
            ranks = [torch.empty_like(p) for _ in range(2)]
            dist.all_gather(ranks, p.detach())
            assert torch.equal(*ranks)
    print("same as one process")
"""

LIGHTNING_FREE = """
from lightning.pytorch import LightningModule, Trainer
from sgdol.trainers.lightning import AveragedWeights, Microbatches

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = build(), []

    def training_step(self, batch):
        return objective(self.net, batch)

    def on_train_batch_start(self, batch, index):
        self.seen.append(batch)

    def configure_optimizers(self):
        return SGDOLFree(self.parameters())

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
for accumulate in (1, 2):
    model = Model()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, accumulate_grad_batches=accumulate,
        callbacks=[Microbatches(), AveragedWeights()], precision="64-true", **quiet,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    if accumulate == 1:
        trainer.fit(model, loader)
        compare_free(model.net, trainer.optimizers[0], model.seen, [[i] for i in range(8)])
    else:
        try:
            trainer.fit(model, loader)
        except ValueError as error:
            assert "one batch of each rank per step" in str(error)
            print("same as one process")
"""

ACCELERATE_FREE = """
from accelerate import Accelerator
from accelerate.state import GradientState
from sgdol.trainers.accelerate import AveragedWeights, Microbatches

for accumulate in (1, 2):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    net = build()
    opt = SGDOLFree(net.parameters())
    model, prepared, loader = accelerator.prepare(net, opt, torch.utils.data.DataLoader(data, batch_size=4))
    microbatches, averaged = Microbatches(accelerator, model, prepared), AveragedWeights(accelerator, model, prepared)
    seen = []
    for batch in loader:
        seen.append(batch)
        with accelerator.accumulate(model):
            microbatches.step(lambda batch: objective(model, batch), batch)
    with averaged:
        steps = [list(range(i, i + accumulate)) for i in range(0, 8, accumulate)]
        compare_free(net, opt, seen, steps)
    GradientState._reset_state()
"""

HUGGINGFACE_FREE = """
from transformers import TrainingArguments
from sgdol.trainers.huggingface import Trainer

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, rows):
        return {"loss": objective(self.net, rows)}

class Mine(Trainer):
    seen = []

    def compute_loss(self, model, inputs, **rest):
        return model(inputs["rows"])["loss"]

    def get_batch_samples(self, *arguments):
        found = super().get_batch_samples(*arguments)
        self.seen += [batch["rows"] for batch in found[0]]
        return found

for accumulate in (1, 2):
    model = Model()
    opt = SGDOLFree(model.parameters())
    args = TrainingArguments(
        "out", num_train_epochs=1, per_device_train_batch_size=4, gradient_accumulation_steps=accumulate, use_cpu=True,
        lr_scheduler_type="constant", max_grad_norm=0, report_to="none", save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Mine(model, args, train_dataset=[{"rows": row} for row in data], optimizers=(opt, None))
    trainer.seen = []
    trainer.train()
    steps = [list(range(i, i + accumulate)) for i in range(0, 8, accumulate)]
    compare_free(model.net, opt, trainer.seen, steps)
"""

PROGRAMS = {
    "lightning": LIGHTNING,
    "accelerate": ACCELERATE,
    "lightning, free": FREE + LIGHTNING_FREE,
    "accelerate, free": FREE + ACCELERATE_FREE,
    "huggingface, free": FREE + HUGGINGFACE_FREE,
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_two_ranks_are_the_same_as_one_process(tmp_path, program):
    script = tmp_path / "train.py"
    script.write_text(COMMON + program)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    assert output([sys.executable, *launch], cwd=tmp_path).count("same as one process") == 4
