"""What a user is told, once each, about a training that runs but does not do what it looks like.

Everything here is counted from numbers that an update knows anyway. On an accelerator the host does not know them
without a wait, and nothing is said there of step sizes and skips: ``diagnostics()`` shows both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["Warnings"]

RUNNING = 10
"""So many updates of size 0, or skipped ones, in a row are no accident."""

SMALLEST, LARGEST = 0.02, 50.0
"""lr of SGDOLFree, which is a multiplier, looks like another optimizer's learning rate outside of this range..."""
WARM_UP = 100
"""...but a schedule by hand that rises from step to step may stay below it for so many steps."""


class _Running(NamedTuple):
    """How often something has happened running, and after how many updates the last time."""

    times: int = 0
    updates: int = -1

    def after(self, updates: int, apart: int) -> _Running:
        """It happens after so many updates; that is running if the last time was ``apart`` updates ago."""
        return _Running(self.times + 1 if updates == self.updates + apart else 1, updates)


class Warnings:
    """Counts, and says a sentence when it is enough.

    Args:
        say: a method that warns, if it has not said the same before. Its object is not kept alive: an optimizer's
            memory must go when the optimizer goes.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._method = weakref.WeakMethod(say)
        self._zeros = self._skips = self._alike = _Running()
        self._lr: float | None = None
        self._low: int | None = None
        self._absolute = False
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

    def skipped(self, groups: Sequence[dict[str, Any]], updates: int) -> None:
        """An update was skipped, after so many others, because a gradient was not finite."""
        self._skips = self._skips.after(updates, 0)
        if self._skips.times == RUNNING and "rule" in groups[0]:
            self._say(
                f"SGDOLFree has skipped {RUNNING} steps in a row: the loss or the gradients are not finite. The step "
                "size is not the cause, because steps that are too long are undone: look for inf and nan in the data, "
                "in the loss function and in what overflows in low precision."
            )
        elif self._skips.times == RUNNING:
            rates = sorted({float(group["lr"]) for group in groups})
            self._say(
                f"SGDOL has skipped {RUNNING} updates in a row: gradients are not finite, the training has diverged. "
                f"lr={', '.join(f'{rate:g}' for rate in rates)} is probably too large: start again with a tenth of it. "
                "If the very first gradients were not finite, look at the data and the loss."
            )

    def identical(self) -> None:
        """The gradients of an update of SGDOL were identical."""
        self._say(
            "SGDOL was given the same gradient twice, so it cannot see any noise and is SGD at the rate lr. "
            "Draw a fresh batch for every backward(), or split a batch into microbatches, and give each rank its "
            "own data. Ignore this if the objective has no noise."
        )

    def stood_still(self, groups: Sequence[dict[str, Any]], updates: int) -> None:
        """All step sizes of an update were 0, after so many others."""
        if all(float(group["lr"]) == 0 for group in groups):
            return
        self._zeros = self._zeros.after(updates, 1)
        if self._zeros.times == RUNNING:
            self._say(
                f"SGDOL's step size has been exactly 0 for {RUNNING} updates in a row: the gradients of a step "
                "contradict each other more than independent draws of one objective do. Usual causes: different "
                "losses in several backward() calls before step() (a GAN's real and fake: add the losses and call "
                "backward() once, or sgdol.torch.backward); gradients that something changed between the passes (a "
                "clipping hook: clip once, before step()); lr far too large; an objective that is all noise."
            )

    def identical_again(self, updates: int) -> None:
        """The gradients of a step of SGDOLFree were identical, after so many steps."""
        self._alike = self._alike.after(updates, 1)
        if self._alike.times == RUNNING:
            self._say(
                f"SGDOLFree was given identical gradients in {RUNNING} steps in a row, so it cannot see any noise and "
                "makes steps that are too long: the halves of the batch are the same samples, or the ranks have the "
                "same data. Give each half, and each rank, samples of its own. Ignore this if there is no noise."
            )

    def given(self, lr: float, *, smallest: float = SMALLEST) -> None:
        """The largest lr of the groups of an SGDOLFree that is being made, or gets another group."""
        if lr and not smallest <= lr <= LARGEST:
            self._looks_absolute(lr)

    def multiplied(self, lr: float, updates: int) -> None:
        """SGDOLFree multiplies a step by lr, the largest of its groups. Zero freezes, and is never warned of.

        A schedule passes through small values, so a low lr is suspected only if it comes from more than
        1/SMALLEST times as much (1 before the first step) in one step, and warned of when it does not rise after that.
        """
        before = self._lr
        if before is None:
            before = lr if updates else 1.0  # of a run that is resumed nobody knows what was before
        if lr == 0:
            return
        self._lr = lr
        if lr > LARGEST:
            self._looks_absolute(lr)
        elif lr >= SMALLEST:
            self._low = None
        elif self._low is not None:
            self._low += 1
            if lr <= before or self._low >= WARM_UP:
                self._looks_absolute(lr)
        elif before >= SMALLEST and lr < SMALLEST * before:
            self._low = 0

    def _looks_absolute(self, lr: float) -> None:
        if self._absolute:
            return
        self._absolute = True
        wrong = f"{1 / lr:,.0f} times too short" if lr < 1 else f"{lr:,.0f} times too long"
        self._say(
            f"lr={lr:g} looks like another optimizer's learning rate. In SGDOLFree lr is a factor on the learned step "
            f"size, so every step is {wrong}: write SGDOLFree(params), and delete the line that sets lr. A schedule "
            "multiplies by 1 at its highest."
        )

    def _say(self, message: str) -> None:
        say = self._method()
        if say is not None:
            say(message)
