"""What a user is told, once each, about a training that runs but does not do what it looks like.

Everything here is counted from numbers that an update knows anyway. On an accelerator the host does not know them
without a wait, and nothing is said there of step sizes and skips: ``diagnostics()`` shows both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgdol.torch._vectors import Layout

__all__ = ["Warnings"]

RUNNING = 10
"""So many updates of size 0, or skipped ones, in a row are no accident."""


class Warnings:
    """Counts, and says a sentence when it is enough.

    Args:
        say: a method that warns, if it has not said the same before. Its object is not kept alive: an optimizer's
            memory must go when the optimizer goes.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._method = weakref.WeakMethod(say)
        self._zeros = 0
        self._skips = 0
        self._alike = 0
        self.several = False
        """Whether several gradients came in one step."""

    def held(self, groups: Sequence[dict[str, Any]]) -> None:
        """A gradient is held. The paper's estimator asks for that, and so does the last batch of an epoch."""
        if not self.several and any(group["estimator"] != "paper" for group in groups):
            self._say(
                "SGDOL got one backward() before step(), holds its gradient and updates at every second step(): it "
                "needs two independent gradients to see the noise. To update at every step, split each batch: "
                "sgdol.torch.backward(loss_fn, *batch) in place of loss_fn(*batch).backward(), at the same cost."
            )

    def taken(self, bent: bool, of_the_world: Sequence[str]) -> None:
        """Several gradients came in one step: one that comes alone later is the last batch of an epoch.

        Args:
            bent: whether gradients were changed after a backward by more than a factor each.
            of_the_world: what the ranks have to say.
        """
        self.several = True
        if bent:
            self.bent()
        for sentence in of_the_world:
            self._say(sentence)

    def not_zeroed(self) -> None:
        """Gradients of the step before were there when the first backward of this one came."""
        self._say(
            "gradients were not zeroed after the last step(), so this step's gradients were added to the old ones. "
            "SGDOL takes what they share for signal, and its step size becomes too large: call zero_grad() after every "
            "step()."
        )

    def bent(self) -> None:
        """Gradients were changed after a backward by more than a factor each."""
        self._say(
            "between backward() and step(), .grad was changed in another way than by multiplying whole tensors (added "
            "noise, clamped entries, a post-accumulate hook that clips). The noise of the gradients can no longer be "
            "estimated, and the step size is wrong. These changes are supported: clip_grad_norm_ after the last "
            "backward(); Tensor.register_hook, which changes each gradient before it is measured; and, with SGDOL and "
            "one backward() per step(), any change."
        )

    def skipped(self, groups: Sequence[dict[str, Any]]) -> None:
        """An update was skipped because a gradient was not finite."""
        self._skips += 1
        if self._skips == RUNNING and "rule" in groups[0]:
            self._say(
                f"SGDOLFree has skipped {RUNNING} steps in a row: the loss or the gradients are not finite. The step "
                "size is not the cause, because steps that are too long are undone: look for inf and nan in the data, "
                "in the loss function and in what overflows in low precision."
            )
        elif self._skips == RUNNING:
            rates = sorted({float(group["lr"]) for group in groups})
            self._say(
                f"SGDOL has skipped {RUNNING} updates in a row: gradients are not finite, the training has diverged. "
                f"lr={', '.join(f'{rate:g}' for rate in rates)} is probably too large: start again with a tenth of it. "
                "If the very first gradients were not finite, look at the data and the loss."
            )

    def updated(self, layout: Layout, step_sizes: Sequence[Any], squared: float, signal: float) -> None:
        """An update was made: the step sizes of the groups that took part, and the numbers of its gradients."""
        self._skips = 0
        if self._identical(layout, squared, signal):
            self._say(
                "SGDOL was given the same gradient twice, so it cannot see any noise and is SGD at the rate lr. "
                "Draw a fresh batch for every backward(), or split a batch into microbatches, and give each rank its "
                "own data. Ignore this if the objective has no noise."
            )
        if any(eta != 0 for eta in step_sizes) or all(float(group["lr"]) == 0 for group in layout.groups):
            self._zeros = 0
            return
        self._zeros += 1
        if self._zeros == RUNNING:
            self._say(
                f"SGDOL's step size has been exactly 0 for {RUNNING} updates in a row: the gradients of a step "
                "contradict each other more than independent draws of one objective do. Usual causes: different "
                "losses in several backward() calls before step() (a GAN's real and fake: add the losses and call "
                "backward() once, or sgdol.torch.backward); gradients that something changed between the passes (a "
                "clipping hook: clip once, before step()); lr far too large; an objective that is all noise."
            )

    def _say(self, message: str) -> None:
        say = self._method()
        if say is not None:
            say(message)

    def moved(self, layout: Layout, squared: float, signal: float) -> None:
        """SGDOLFree has made a step: the numbers of its gradients."""
        self._skips = 0
        self._alike = self._alike + 1 if self._identical(layout, squared, signal) else 0
        if self._alike == RUNNING:
            self._say(
                f"SGDOLFree was given identical gradients in {RUNNING} steps in a row, so it cannot see any noise and "
                "makes steps that are too long: the halves of the batch are the same samples, or the ranks have the "
                "same data. Give each half, and each rank, samples of its own. Ignore this if there is no noise."
            )

    @staticmethod
    def _identical(layout: Layout, squared: float, signal: float) -> bool:
        """Identical gradients have u = n: the same batch was used twice, or there is no noise at all."""
        eps = torch.finfo(layout.entries[0].dtype).eps
        return squared > 0 and abs(squared - signal) <= 8 * eps * squared
