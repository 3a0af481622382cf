"""Larger ordinary networks: how fast and how far tuned and untuned optimizers come in the same number of gradients.

    from benchmarks.networks import contenders, get_network, run

    network = get_network("gpt-python")                 # of the half on which to choose defaults
    free = next(c for c in contenders() if c.label == "SGDOLFree")
    result = run(network, free.method, seed=1, rate=None, budget=network.budget)
    print(result.curves["average"].end, result.curves["average"].validation, result.rise, result.seconds)

Modules, in the order in which data flows: ``data`` -> ``kinds`` (networks and their losses) -> ``problems`` (the suite)
and ``methods`` with ``optimizers`` (the contenders) -> ``probe`` and ``training`` (one run) -> ``harness`` (tuning and
seeds; the cache and the processes are those of ``benchmarks.quality``) -> ``targets``, ``tables`` and ``page``.
``python -m benchmarks.networks --help`` runs all of it.
"""

from benchmarks.networks.methods import contenders
from benchmarks.networks.problems import get as get_network
from benchmarks.networks.problems import suite
from benchmarks.networks.training import Result, run

__all__ = ["Result", "contenders", "get_network", "run", "suite"]
