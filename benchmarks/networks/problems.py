"""The larger networks: 1e5 to 5e5 parameters, ordinary initialisations, 500 to 2,000 batches.

The halves were fixed by kind before methods were compared on them; sizes were set with a few runs of AdamW. The
kinds of the development half are those on which SGDOLFree's rule has been looked at before, in other instances. Of the
held-out half, fine-tuning and telling rotations have been looked at too (a whole GPT, another network), and small
networks of some other kinds are in the quality suite.

>>> problem = get("gpt-python")
>>> problem.half, problem.kind, problem.budget
('development', 'gpt', 500)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.networks.kinds import images, language, others
from benchmarks.quality.data import PARTS
from benchmarks.quality.objectives import Objective
from benchmarks.quality.problem import HALVES, Half, Problem

__all__ = ["get", "suite"]


@functools.cache
def suite() -> tuple[Problem, ...]:
    """All of them, the development half first."""
    dev, held = HALVES
    even, odd = PARTS
    listed: list[Problem] = []

    def add(name: str, kind: str, half: Half, budget: int, build: Callable[..., Objective], **options: Any) -> None:
        listed.append(Problem(name, kind, half, budget, build, options))

    add("gpt-python", "gpt", dev, 500, language.gpt, part=even, length=64, width=128, layers=2, batch=16)
    add(
        "resnet-crops", "resnet", dev, 500, images.resnet,
        part=even, size=8, channels=(32, 32, 64, 64, 128, 128), batch=32,
    )  # fmt: skip
    add("experts-adult", "experts", dev, 1000, others.experts, part=even, experts=8, hidden=256, batch=64)
    add(
        "td-walk", "td", dev, 2000, others.temporal_difference,
        dimension=6, hidden=(512, 512), transitions=8192, batch=128, copy_every=50, data_seed=51,
    )  # fmt: skip
    add(
        "simclr-crops", "contrastive", dev, 500, images.simclr,
        part=even, size=12, channels=(32, 64), hidden=192, temperature=0.2, batch=128,
    )  # fmt: skip
    add("ddpm-mnist", "diffusion", dev, 500, others.ddpm, part=even, channels=32, batch=16)
    add("lstm-english", "lstm", dev, 600, language.lstm, part=even, length=32, width=192, layers=1, batch=16)

    add("vit-crops", "vit", held, 500, images.vit, part=odd, size=24, patch=4, width=128, layers=2, batch=32)
    add("mixer-rotations", "mixer", held, 600, images.mixer, part=odd, size=24, patch=4, width=96, layers=3, batch=32)
    add("vae-mnist", "vae", held, 1000, others.vae, part=odd, widths=(512, 256), latent=24, batch=128)
    add(
        "gnn-hitting", "graph", held, 1000, others.gnn,
        nodes=20, graphs=4000, degree=2.0, width=96, rounds=4, batch=32, data_seed=52,
    )  # fmt: skip
    add(
        "seq2seq-restore", "seq2seq", held, 500, language.seq2seq,
        part=odd, length=32, width=128, layers=1, noise=0.15, batch=16,
    )  # fmt: skip
    add(
        "lora-english", "finetuning", held, 500, language.finetuning,
        part=odd, length=48, width=128, layers=2, rank=48, pretraining=200, batch=12,
    )  # fmt: skip
    add(
        "wavenet-notes", "wavenet", held, 600, language.wavenet,
        length=128, notes=4000, width=64, layers=6, batch=8, data_seed=53,
    )  # fmt: skip
    return tuple(listed)


def get(name: str) -> Problem:
    """The network of that name."""
    for problem in suite():
        if problem.name == name:
            return problem
    raise KeyError(f"no network is called {name!r}; there are {', '.join(p.name for p in suite())}")
