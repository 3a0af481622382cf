"""SGDOL and SGDOLFree in other people's training loops: Lightning, Hugging Face Trainer and Accelerate.

The optimizers are the same everywhere, ``sgdol.SGDOL`` and ``sgdol.SGDOLFree``. Each trainer has a module with the
callbacks or mixins that it needs: :mod:`sgdol.trainers.lightning`, :mod:`sgdol.trainers.huggingface` and
:mod:`sgdol.trainers.accelerate` (``pip install 'sgdol[trainers]'``). Each module has

* ``Microbatches``: every step gets two independent gradients, from the halves of its batch or from the batches that are
  accumulated, and SGDOLFree a closure that evaluates them again;
* ``AveragedWeights``: evaluation and saved weights at the average, and exact resuming from the iterate beside it;
* ``StepSizeMonitor``: the learned step size in the trainer's logs.

Without ``Microbatches`` gradient accumulation over k >= 2 batches gives SGDOL k independent gradients and an update per
accumulated batch. Without accumulation it holds the first gradient and updates at the second step, so that what the
trainer counts as two steps is one update.
"""
