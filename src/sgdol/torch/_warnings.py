"""Warnings, once each, about a training that runs but does not do what it looks like.

They are made of numbers that an update has on the host anyway. On an accelerator the host would have to wait for them,
so there is no warning of step sizes and skips there: ``diagnostics()`` shows both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Warnings"]

STREAK = 10  # so many updates of size 0, or skipped ones, in a row are no accident
MANY, OFTEN = 5, 20  # so many rollbacks, more than one in so many steps, are none either

# lr of SGDOLFree, which is a multiplier, looks like another optimizer's learning rate outside of this range; but a
# schedule by hand that rises from step to step may stay below it for so many steps.
SMALLEST, LARGEST = 0.02, 50.0
WARM_UP = 100


class Warnings:
    """Counts what happens in a training, and warns when it is no accident any more.

    Args:
        warn: a method of the optimizer that warns, if it has not said the same before. The optimizer is not kept alive.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._method = weakref.WeakMethod(warn)
        self._streaks: dict[str, tuple[int, int]] = {}  # how often in a row, and the number of updates the last time
        self._lr: float | None = None  # of the last step of SGDOLFree
        self._low_steps: int | None = None  # how many steps ago lr fell below SMALLEST at once
        self._said_absolute = False
        self.several = False  # True once several gradients came in one step

    def _streak(self, what: str, updates: int, apart: int = 1) -> bool:
        """Count; True if it has happened STREAK times in a row: ``apart`` updates apart, 0 for skipped ones."""
        times, last = self._streaks.get(what, (0, -1))
        times = times + 1 if updates == last + apart else 1
        self._streaks[what] = times, updates
        return times == STREAK

    def held(self, groups: Sequence[dict[str, Any]]) -> None:
        # The paper's estimator needs that, and the last batch of an epoch may be a single gradient.
        if not self.several and any(group["estimator"] != "paper" for group in groups):
            self._say(
                "SGDOL got one backward() before step(), holds its gradient and updates at every second step(): it "
                "needs two independent gradients to see the noise. To update at every step, split each batch: "
                "sgdol.torch.backward(loss_fn, *batch) in place of loss_fn(*batch).backward(), at the same cost."
            )

    def taken(self, distorted: bool, from_world: Sequence[str]) -> None:
        """Several gradients came in one step; ``distorted``: one was changed after a backward by more than a factor."""
        self.several = True
        if distorted:
            self._say(
                "between backward() and step(), .grad was changed in another way than by multiplying whole tensors "
                "(added noise, clamped entries, a post-accumulate hook that clips). The noise of the gradients can no "
                "longer be estimated, and the step size is wrong. These changes are supported: clip_grad_norm_ after "
                "the last backward(); Tensor.register_hook, which changes each gradient before it is measured; and, "
                "with SGDOL and one backward() per step(), any change."
            )
        for message in from_world:
            self._say(message)

    def not_zeroed(self) -> None:
        self._say(
            "gradients were not zeroed after the last step(), so this step's gradients were added to the old ones. "
            "SGDOL takes what they share for signal, and its step size becomes too large: call zero_grad() after every "
            "step()."
        )

    def skipped(self, groups: Sequence[dict[str, Any]], updates: int) -> None:
        if not self._streak("skipped", updates, apart=0):
            return
        if "rule" in groups[0]:  # the state of SGDOLFree
            self._say(
                f"SGDOLFree has skipped {STREAK} steps in a row: the loss or the gradients are not finite. The step "
                "size is not the cause, because steps that are too long are undone: look for inf and nan in the data, "
                "in the loss function and in what overflows in low precision."
            )
        else:
            rates = sorted({float(group["lr"]) for group in groups})
            self._say(
                f"SGDOL has skipped {STREAK} updates in a row: gradients are not finite, the training has diverged. "
                f"lr={', '.join(f'{rate:g}' for rate in rates)} is probably too large: start again with a tenth of it. "
                "If the very first gradients were not finite, look at the data and the loss."
            )

    def identical(self) -> None:
        self._say(
            "SGDOL was given the same gradient twice, so it cannot see any noise and is SGD at the rate lr. "
            "Draw a fresh batch for every backward(), or split a batch into microbatches, and give each rank its "
            "own data. Ignore this if the objective has no noise."
        )

    def stood_still(self, groups: Sequence[dict[str, Any]], updates: int) -> None:
        frozen = all(float(group["lr"]) == 0 for group in groups)  # on purpose
        if not frozen and self._streak("stood still", updates):
            self._say(
                f"SGDOL's step size has been exactly 0 for {STREAK} updates in a row: the gradients of a step "
                "contradict each other more than independent draws of one objective do. Usual causes: different "
                "losses in several backward() calls before step() (a GAN's real and fake: add the losses and call "
                "backward() once, or sgdol.torch.backward); gradients that something changed between the passes (a "
                "clipping hook: clip once, before step()); lr far too large; an objective that is all noise."
            )

    def identical_again(self, updates: int) -> None:
        """The gradients of a step of SGDOLFree were identical."""
        if self._streak("identical", updates):
            self._say(
                f"SGDOLFree was given identical gradients in {STREAK} steps in a row, so it cannot see any noise and "
                "makes steps that are too long: the halves of the batch are the same samples, or the ranks have the "
                "same data. Give each half, and each rank, samples of its own. Ignore this if there is no noise."
            )

    def rolled_back(self, rollbacks: int, updates: int) -> None:
        """SGDOLFree has returned to its average so many times."""
        if rollbacks >= MANY and rollbacks * OFTEN > updates:
            self._say(
                f"SGDOLFree has returned to its average in more than one of {OFTEN} steps, because the loss of a batch "
                "was far above that of the batches before. If batches belong to different tasks or losses, put a share "
                "of each into every batch; else look for outliers in the data."
            )

    def given(self, lr: float, *, smallest: float = SMALLEST) -> None:
        """The largest lr of an SGDOLFree that is made, or of a group that is added."""
        if lr and not smallest <= lr <= LARGEST:
            self._looks_absolute(lr)

    def multiplied(self, lr: float, updates: int) -> None:
        """The largest lr in a step of SGDOLFree.

        A schedule passes through small values. So a low lr is suspected only if it comes from more than 1/SMALLEST
        times as much (1 before the first step) in one step, and warned of if it does not rise after that.
        """
        before = self._lr
        if before is None:
            before = lr if updates else 1.0  # after resuming, lr of the step before is not known
        if lr == 0:  # frozen on purpose
            return
        self._lr = lr
        if lr > LARGEST:
            self._looks_absolute(lr)
        elif lr >= SMALLEST:
            self._low_steps = None
        elif self._low_steps is not None:
            self._low_steps += 1
            if lr <= before or self._low_steps >= WARM_UP:
                self._looks_absolute(lr)
        elif before >= SMALLEST and lr < SMALLEST * before:
            self._low_steps = 0

    def _looks_absolute(self, lr: float) -> None:
        if self._said_absolute:  # the message has lr in it, so it would not be recognised as the same
            return
        self._said_absolute = True
        wrong = f"{1 / lr:,.0f} times too short" if lr < 1 else f"{lr:,.0f} times too long"
        self._say(
            f"lr={lr:g} looks like another optimizer's learning rate. In SGDOLFree lr is a factor on the learned step "
            f"size, so every step is {wrong}: write SGDOLFree(params), and delete the line that sets lr. A schedule "
            "multiplies by 1 at its highest."
        )

    def _say(self, message: str) -> None:
        warn = self._method()
        if warn is not None:
            warn(message)
