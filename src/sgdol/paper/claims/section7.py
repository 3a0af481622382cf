"""Section 7, the findings: what its fifth paragraph says of Figure 1."""

from __future__ import annotations

from collections.abc import Iterable

from sgdol.paper.claims import behaviour
from sgdol.paper.claims._check import COMPARABLE_REASON, STALL_REASON, claim
from sgdol.paper.claims.behaviour import SGDOL
from sgdol.paper.experiments import ADULT, ROSENBROCK
from sgdol.paper.measures import Reader, final_ratio, part
from sgdol.paper.verdict import Part

FIFTH = "Section 7, fifth paragraph"


@claim(
    "step-same-at-first",
    kind="finding",
    sentence="As can be seen, the stepsize of SGDOL is the same as SGD at first,",
    where=FIFTH,
    check="the relative distance between the two step sizes, mean over repeats: at the first iteration, and the largest"
    " in the first ten",
    reason="the first step is the same by construction, and 1e-9 is for rounding; the step sizes are drawn on a linear"
    " axis, where 5 % can be seen, and ten iterations are the first decade of the horizontal axis",
    figures=(1,),
)
def same_step_at_first(read: Reader) -> Iterable[Part]:
    """SGDOL starts with SGD's step size."""
    return behaviour.same_step_at_first(read, ADULT)


@claim(
    "step-decreases",
    kind="finding",
    sentence="but gradually decreases automatically.",
    where=FIFTH,
    check="under noise: the last step size over the first, and how far it ever rises above an earlier value, mean over"
    " repeats",
    reason="half is a decrease that can be seen; a rise of more than 5 % of the first step size can be seen too",
    figures=(1,),
)
def gradual_decrease(read: Reader) -> Iterable[Part]:
    """Its step size falls."""
    return behaviour.gradual_decrease(read, ADULT)


@claim(
    "step-decreases-sooner",
    kind="finding",
    sentence="Also, the larger the noise, the sooner the decreasing phase starts.",
    where=FIFTH,
    check="the iteration at which the mean step size has lost a tenth of its first value, as a ratio between two levels"
    " of noise",
    reason="0.8 is a difference beyond the resolution of the recorded iterations",
    figures=(1,),
)
def sooner(read: Reader) -> Iterable[Part]:
    """It falls sooner under more noise."""
    return behaviour.sooner(read, ADULT)


@claim(
    "decrease-makes-convergence",
    kind="finding",
    sentence="The decrease of the learning rate makes the convergence of SGDOL possible.",
    where=FIFTH,
    check="under noise, SGDOL against SGD, which is SGDOL without the decrease: the running means at the horizon",
    reason="the decrease pays if the run with it ends lower; any difference counts",
    figures=(1,),
)
def decrease_makes_convergence(read: Reader) -> Iterable[Part]:
    """The decrease pays."""
    return behaviour.better_than_fixed(read, ADULT)


@claim(
    "recovers-sgd",
    kind="finding",
    sentence="In particular, SGDOL recovers the performance of SGD in the noiseless case,",
    where=FIFTH,
    check="the largest relative distance between the two curves of the mean squared gradient over all iterations",
    reason="1 % is a line's width on a logarithmic axis; in exact arithmetic the two are the same",
    figures=(1,),
)
def recovers_sgd(read: Reader) -> Iterable[Part]:
    """Without noise SGDOL is SGD."""
    return behaviour.recovers_sgd(read, ADULT)


@claim(
    "converges-under-noise",
    kind="finding",
    sentence="while it allows convergence in the noisy cases through an automatic decrease of the stepsizes.",
    where=FIFTH,
    check="the decade ratio of SGDOL under noise",
    reason=STALL_REASON,
    figures=(1,),
)
def converges_under_noise(read: Reader) -> Iterable[Part]:
    """Under noise SGDOL converges."""
    return behaviour.converges(read, ADULT, SGDOL)


@claim(
    "adagrad-comparable",
    kind="finding",
    sentence="AdaGrad also enjoys nice convergence, and is comparable to ours.",
    where=FIFTH,
    check="AdaGrad Global's decade ratio under noise, and the factor between its running mean at the horizon and"
    " SGDOL's",
    reason=f"{STALL_REASON}; {COMPARABLE_REASON}",
    figures=(1,),
)
def adagrad(read: Reader) -> Iterable[Part]:
    """AdaGrad converges and is comparable."""
    yield from behaviour.converges(read, ADULT, "AdaGrad Global")
    yield from behaviour.comparable(read, ADULT, "AdaGrad Global")


@claim(
    "sgd-adam-oscillate",
    kind="finding",
    sentence="In contrast, when noise exists, after reaching a proximity of a stationary point, SGD and Adam oscillates"
    " thereafter without converging,",
    where=FIFTH,
    check="the decade ratios of SGD and Adam under noise",
    reason=STALL_REASON,
    figures=(1,),
)
def oscillates(read: Reader) -> Iterable[Part]:
    """SGD and Adam stall under noise."""
    return behaviour.stalls(read, ADULT, ("SGD", "Adam"))


@claim(
    "level-depends-on-noise",
    kind="finding",
    sentence="and the value it oscillates around depends on the variance of the noise.",
    where=FIFTH,
    check="the level under the larger noise over the level under the smaller one",
    reason=f"the variances differ fifty-fold; {COMPARABLE_REASON}",
    figures=(1,),
)
def level_depends(read: Reader) -> Iterable[Part]:
    """They stall higher under more noise."""
    return behaviour.level_depends(read, ADULT)


@claim(
    "superiority",
    kind="finding",
    sentence="This underlines the superiority of the surrogate losses, rather than choosing a stepsize based on a"
    " worst-case convergence rate bound.",
    where=FIFTH,
    check="SGDOL against SGD GL, the one step size of the experiments that a worst-case bound gives (on Rosenbrock's"
    " function, where its constants are known): the ratio of their running means at the horizon",
    reason="superior means lower; 1 % is for equality without noise, where both have the step size 1/M",
    figures=(2,),
)
def superiority(read: Reader) -> Iterable[Part]:
    """SGDOL ends below the step size of a worst-case bound."""
    for noise in ROSENBROCK.noises:
        yield part(
            f"{noise}: running mean of {SGDOL} over that of SGD GL",
            [read.curve(ROSENBROCK.name, noise, method) for method in (SGDOL, "SGD GL")],
            final_ratio,
            "<=",
            1.01,
            main=noise == ROSENBROCK.largest_noise,
        )
