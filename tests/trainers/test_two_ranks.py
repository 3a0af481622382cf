"""Trainers on two ranks with gloo: k = ranks x accumulated batches, the same as one process, for both optimizers."""

import sys

import pytest
from processes import output

COMMON = """
import contextlib
import torch
import torch.distributed as dist
from sgdol import SGDOL, SGDOLFree

torch.set_num_threads(1)
data = torch.randn(64, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

def build():
    torch.manual_seed(0)
    return torch.nn.Linear(5, 1).double()

def objective(net, batch):
    return (net(batch[:, :5]) - batch[:, 5:]).square().mean()

def make(free, params):
    return SGDOLFree(params) if free else SGDOL(params, lr=0.1)

def compare(net, opt, seen, free, accumulate):
    every = [None, None]
    dist.all_gather_object(every, seen)
    hand = build()
    hand_opt = make(free, hand.parameters())
    for start in range(0, 8, accumulate):
        def closure():
            hand_opt.zero_grad()
            batches = [rank[i] for i in range(start, start + accumulate) for rank in every]
            losses = [objective(hand, batch) / len(batches) for batch in batches]
            for loss in losses:
                loss.backward()
            return sum(losses)
        hand_opt.step(closure)
    found, expected = opt.diagnostics(), hand_opt.diagnostics()
    assert found["gradients"] == expected["gradients"] == 2 * accumulate, found
    assert found["updates"] == expected["updates"] == 8 // accumulate, found
    assert found.get("evaluations") == expected.get("evaluations"), found
    torch.testing.assert_close(torch.tensor(found["step_size"]), torch.tensor(expected["step_size"]))
    tolerance = 1e-9 if free else 1e-12
    with hand_opt.averaged() if free else contextlib.nullcontext():
        for p, q in zip(net.parameters(), hand.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
            ranks = [torch.empty_like(p) for _ in range(2)]
            dist.all_gather(ranks, p.detach())
            assert torch.equal(*ranks)
    print("same as one process")

CASES = [(free, accumulate) for free in (False, True) for accumulate in (1, 2)]
"""

LIGHTNING = """
from lightning.pytorch import LightningModule, Trainer
from sgdol.trainers.lightning import AveragedWeights, Microbatches

class Model(LightningModule):
    def __init__(self, free):
        super().__init__()
        self.net, self.seen, self.free = build(), [], free

    def training_step(self, batch):
        return objective(self.net, batch)

    def on_train_batch_start(self, batch, index):
        self.seen.append(batch)

    def configure_optimizers(self):
        return make(self.free, self.parameters())

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
for free, accumulate in CASES:
    model = Model(free)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, accumulate_grad_batches=accumulate,
        callbacks=[Microbatches(), AveragedWeights()] if free else [], precision="64-true", **quiet,
    )
    try:
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
        compare(model.net, trainer.optimizers[0], model.seen, free, accumulate)
    except ValueError as error:
        assert free and accumulate == 2 and "one batch of each rank per step" in str(error), error
        print("same as one process")
"""

ACCELERATE = """
from accelerate import Accelerator
from accelerate.state import GradientState
from sgdol.trainers.accelerate import AveragedWeights, Microbatches

for free, accumulate in CASES:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    net = build()
    opt = make(free, net.parameters())
    model, prepared, loader = accelerator.prepare(net, opt, torch.utils.data.DataLoader(data, batch_size=4))
    seen, averaged = [], contextlib.nullcontext()
    if free:
        microbatches = Microbatches(accelerator, model, prepared)
        averaged = AveragedWeights(accelerator, model, prepared)
    for batch in loader:
        seen.append(batch)
        with accelerator.accumulate(model):
            if free:
                microbatches.step(lambda batch: objective(model, batch), batch)
            else:
                accelerator.backward(objective(model, batch))
                prepared.step()
                prepared.zero_grad()
    with averaged:
        compare(net, opt, seen, free, accumulate)
    GradientState._reset_state()
"""

HUGGINGFACE = """
from transformers import TrainingArguments
from sgdol.trainers.huggingface import Trainer

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, rows):
        return {"loss": objective(self.net, rows)}

class Mine(Trainer):
    def compute_loss(self, model, inputs, **rest):
        return model(inputs["rows"])["loss"]

    def get_batch_samples(self, *arguments):
        found = super().get_batch_samples(*arguments)
        self.seen += [batch["rows"] for batch in found[0]]
        return found

for accumulate in (1, 2):
    model = Model()
    opt = make(True, model.parameters())
    args = TrainingArguments(
        "out", num_train_epochs=1, per_device_train_batch_size=4, gradient_accumulation_steps=accumulate, use_cpu=True,
        lr_scheduler_type="constant", max_grad_norm=0, report_to="none", save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Mine(model, args, train_dataset=[{"rows": row} for row in data], optimizers=(opt, None))
    trainer.seen = []
    trainer.train()
    compare(model.net, opt, trainer.seen, True, accumulate)
"""

PROGRAMS = {"lightning": (LIGHTNING, 8), "accelerate": (ACCELERATE, 8), "huggingface": (HUGGINGFACE, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_ranks_are_the_same_as_one_process(tmp_path, name):
    program, count = PROGRAMS[name]
    script = tmp_path / "train.py"
    script.write_text(COMMON + program)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    assert output([sys.executable, *launch], cwd=tmp_path).count("same as one process") == count
