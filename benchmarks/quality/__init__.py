"""How good optimizers are: a suite of problems, methods, and the table that compares them at equal budgets.

    from benchmarks.quality import development, get_method, run

    for problem in development():                       # the half on which to choose defaults
        result = run(problem, get_method("sgd"), seed=1, rate=problem.scales.gradient * 0.1)
        print(problem.name, result.outcomes["last"].gap, result.outcomes["average"].gap, result.evaluations)

With an optimizer of one's own, in one's own loop:

    instance = development()[0].make(seed=1)            # .parameters(), .loss(step, part, parts), .problem.budget
    optimizer = torch.optim.SGD(instance.parameters(), lr=1e-3)
    for step in range(instance.problem.budget):         # one gradient evaluation each
        optimizer.zero_grad()
        for part in range(2):                           # two halves of one batch cost one evaluation
            (instance.loss(step, part, parts=2) / 2).backward()
        optimizer.step()
    print(instance.gap(instance.objective.evaluate()))  # loss over the optimum; a network's training loss

or as a method that ``run`` trains, counting evaluations where gradients are made:

    method = Method("mine", "my_module:MyOptimizer", {"option": 1}, package="sgdol", parts=2, closure=True)
    run(problem, method, seed=1)                        # optimizer.step(closure) may call closure() again

Modules, in the order in which data flows: ``data`` (what packages ship) -> ``objectives`` and ``networks`` (functions)
-> ``kinds`` (one module per kind of problem) -> ``problem`` and ``problems`` (the suite) and ``methods`` (the
contenders) -> ``training`` (one run) -> ``digest`` and ``harness`` (tuning, seeds, cache) -> ``tables``, ``page`` and
``figure``. ``python -m benchmarks.quality --help`` runs all of it.
"""

from benchmarks.quality.methods import Contender, Method, contenders
from benchmarks.quality.methods import get as get_method
from benchmarks.quality.problems import Instance, Problem, development, held_out, suite
from benchmarks.quality.problems import get as get_problem
from benchmarks.quality.training import Outcome, Result, run

__all__ = [
    "Contender",
    "Instance",
    "Method",
    "Outcome",
    "Problem",
    "Result",
    "contenders",
    "development",
    "get_method",
    "get_problem",
    "held_out",
    "run",
    "suite",
]
