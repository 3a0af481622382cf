"""SGDOL in other people's training loops: Lightning, Hugging Face Trainer and Accelerate.

The optimizer itself is the same everywhere, ``sgdol.SGDOL``. What each trainer needs besides stands in a module of its
own, which imports its framework: :mod:`sgdol.trainers.lightning`, :mod:`sgdol.trainers.huggingface` and
:mod:`sgdol.trainers.accelerate` (``pip install 'sgdol[trainers]'``).

In all three, gradient accumulation over k >= 2 batches gives k independent gradients and an update per accumulated
batch. Without accumulation the optimizer holds the first gradient and updates at the second step, so that what the
trainer counts as two steps is one update.
"""
