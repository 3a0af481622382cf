"""The larger networks build, have finite gradients and depend on the seed alone; targets and tables by hand."""

import dataclasses
import doctest
import math

import pytest
import torch
from benchmarks.networks import contenders, harness, methods, page, problems, tables, targets, training
from benchmarks.networks.__main__ import main
from benchmarks.networks.harness import Line
from benchmarks.networks.optimizers import MuonAdamW, mark_outer_layers
from benchmarks.networks.probe import Probe
from benchmarks.quality.tables import DEFAULT, TUNED, read_rows, write_rows

NAMES = [p.name for p in problems.suite()]
SMALLER = {"pretraining": 2, "transitions": 512, "notes": 100, "graphs": 200}
"""Options that only cost time when a network is made."""


def get(name):
    """The network, with less to prepare."""
    problem = problems.get(name)
    return dataclasses.replace(problem, options={k: SMALLER.get(k, v) for k, v in problem.options.items()})


def method_of(name):
    return next(c.method for c in contenders() if c.method.name == name)


# The networks ---------------------------------------------------------------------------------------------------------


def test_the_halves_have_other_kinds():
    halves = [{p.kind for p in problems.suite() if p.half == half} for half in ("development", "held-out")]
    assert halves[0].isdisjoint(halves[1])
    assert len(NAMES) == len(set(NAMES)) >= 10
    assert all(500 <= p.budget <= 3000 for p in problems.suite())


@pytest.mark.parametrize("name", NAMES)
def test_a_network_builds_and_its_seed_decides_its_gradient(name):
    first, again, other = (get(name).make(seed, steps=3) for seed in (1, 1, 2))
    assert 1e5 <= sum(p.numel() for p in first.parameters()) <= 3e6
    gradients = []
    for instance in (first, again, other):
        losses = [instance.loss(0), (instance.loss(2, 0, 2) + instance.loss(2, 1, 2)) / 2]
        sum(losses).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in instance.parameters()]))
    assert gradients[0].isfinite().all()
    assert gradients[0].count_nonzero() > 0
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2])


@pytest.mark.parametrize("name", ["resnet-crops", "td-walk", "ddpm-mnist", "lora-english"])
def test_the_probe_measures_both_losses_and_leaves_training_as_it_was(name):
    instance, plain = get(name).make(1, steps=2), get(name).make(1, steps=2)
    probe = Probe(instance.objective)
    assert math.isfinite(probe.training())
    assert probe.training() == probe.training() != probe.validation()
    assert torch.equal(instance.loss(0), plain.loss(0))


def test_the_target_network_is_copied_every_so_many_batches():
    instance = get("td-walk").make(1)
    target, network = instance.objective.target[0], instance.objective.network
    with torch.no_grad():
        network[0].weight.add_(1.0)
    instance.loss(49)
    assert not torch.equal(target[0].weight, network[0].weight)
    instance.loss(50)
    assert torch.equal(target[0].weight, network[0].weight)
    with torch.no_grad():
        network[0].weight.add_(1.0)
    instance.loss(50)  # the same batch again copies nothing
    assert not torch.equal(target[0].weight, network[0].weight)


# One training ---------------------------------------------------------------------------------------------------------


def test_a_run_is_a_plain_loop_with_the_schedule():
    problem, budget = get("experts-adult"), 12
    result = training.run(problem, method_of("adamw-warmup"), seed=2, rate=3e-3, budget=budget)
    instance = problem.make(2, steps=budget)
    optimizer = torch.optim.AdamW(instance.parameters(), weight_decay=0.0)
    probe, losses = Probe(instance.objective), []
    for step in range(budget):
        optimizer.param_groups[0]["lr"] = training.rate_at(step, budget, 3e-3)
        optimizer.zero_grad()
        instance.loss(step).backward()
        optimizer.step()
        losses.append(probe.training())
    curve = result.curves["last"]
    assert curve.losses == losses
    assert curve.evaluations == list(range(1, 13))
    assert curve.end == pytest.approx(sum(losses[-3:]) / 3)
    assert curve.validation == probe.validation()
    assert sorted(curve.seconds) == curve.seconds


@pytest.mark.parametrize("name", [m.name for m in methods.METHODS])
def test_evaluating_on_the_way_does_not_change_a_run(name, monkeypatch):
    problem, method = get("experts-adult"), method_of(name)
    rate = methods.USUAL.get(name)
    often = training.run(problem, method, 1, rate, 16)
    monkeypatch.setattr(training, "checkpoints", lambda budget: [budget])
    once = training.run(problem, method, 1, rate, 16)
    for point in method.points:
        # Schedule-Free moves to its average and back, which rounds.
        assert often.curves[point].losses[-1] == pytest.approx(once.curves[point].losses[-1], rel=1e-4)
        assert often.curves[point].losses[-1] < often.start
    assert often.evaluations >= 16
    assert often.rise < 1.5


def test_muon_moves_hidden_matrices_and_adamw_the_rest():
    module = torch.nn.ModuleDict(
        {"embedding": torch.nn.Embedding(5, 4), "conv": torch.nn.Conv2d(2, 3, 2), "head": torch.nn.Linear(4, 2)}
    )
    mark_outer_layers(module)
    optimizer = MuonAdamW(module.parameters(), lr=0.1)
    assert [p is module["conv"].weight for p in optimizer.hidden] == [True]
    before = module["conv"].weight.detach().clone()
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    moved = (module["conv"].weight.detach() - before).view(3, -1)
    assert torch.linalg.svdvals(moved).max() / torch.linalg.svdvals(moved).min() < 2  # nearly orthogonal rows


# Tuning, targets and tables -------------------------------------------------------------------------------------------


def line(contender, problem, seed, loss, curve="", group=TUNED, **more):
    plain = Line(
        half="development", problem=problem, kind="gpt", contender=contender, group=group, method="m", point="last",
        learning_rate=0.1, edge=False, tried=4, seed=seed, loss=loss, start=9.0, validation=2 * loss, diverged=False,
        rise=1.0, evaluations=100, steps=100, seconds=2.0, curve=curve, digest="",
    )  # fmt: skip
    return dataclasses.replace(plain, **more)


BY_HAND = [
    line(methods.BASELINE, "p", 1, 1.0, "50 3 1; 100 1 2"),
    line(methods.BASELINE, "p", 2, 2.0, "50 3 1; 100 2 2"),
    line(methods.BASELINE, "p", 3, 4.0, "50 5 1; 100 4 2"),  # the median is 2, the geometric mean 2
    line("other", "p", 1, 1.0, "25 2.5 2; 50 2 4; 75 1 6; 100 1 8", DEFAULT, seconds=8.0),
    line("other", "p", 2, 1.0, "25 2.1 2; 50 2.1 4; 75 2.1 6; 100 1 8", DEFAULT, seconds=8.0, rise=7.0),
    line("other", "p", 3, 8.0, "25 8 2; 50 8 4; 75 8 6; 100 8 8", DEFAULT, seconds=8.0),
]


def test_the_target_is_the_median_that_the_baseline_ends_with():
    assert targets.targets(BY_HAND) == {"p": targets.Target(2.0, 100, 2.0)}


def test_a_target_is_hit_at_the_first_evaluation_that_is_not_above_it():
    target = targets.Target(2.0, 100, 2.0)
    hits = [targets.hit(targets.points(r.curve), target) for r in BY_HAND]
    assert hits == [targets.Hit(1, 1), targets.Hit(1, 1), None, targets.Hit(0.5, 2), targets.Hit(1, 4), None]
    assert targets.hit([], target) is None
    assert targets.hit([(10, math.nan, 1.0)], target) is None


def test_a_summary_by_hand():
    other, base = tables.summarise(BY_HAND)
    assert (base.contender, base.hits, base.mean) == (methods.BASELINE, 2, pytest.approx(1.0))
    assert (other.hits, other.runs, other.rise) == (2, 3, 7.0)
    assert other.mean == pytest.approx(1.0)  # of 1/2, 1/2 and 4
    assert (other.low, other.high) == (pytest.approx(0.5), pytest.approx(4.0))
    assert other.evaluations == pytest.approx(math.sqrt(0.5))
    assert other.seconds == pytest.approx(math.sqrt(8))
    assert other.cost == pytest.approx(4.0)
    assert other.validation == pytest.approx(1.0)


def test_saved_lines_are_read_as_they_were_written_and_make_a_page(tmp_path):
    write_rows(tmp_path / "runs.csv", BY_HAND, Line)
    saved = read_rows(tmp_path / "runs.csv", Line)
    assert saved == BY_HAND
    about = {"versions": {"torch": "0"}, "command": "c", "seeds": [1], "tuning_seed": 0, "machine": "m"}
    text = page.markdown(saved, about)
    assert "| other | 1.00 | 0.50 to 4.00 |" in text
    assert "4 learning rates were looked at for 1 pairs" in text


def test_learning_rates_are_tuned_on_half_decades_around_the_usual_one(tmp_path, monkeypatch):
    seen = []

    def trained(problem, method, seed, rate, budget):
        seen.append((seed, rate))
        curve = training.Curve([budget], [1 + abs(math.log10(rate) - math.log10(3e-2))], [1.0], 1.0)
        return training.Result({"last": curve}, 9.0, 1.0, budget, budget, 1.0, False)

    monkeypatch.setattr(training, "run", trained)
    baseline = next(c for c in contenders() if c.label == methods.BASELINE)
    lines = harness.measure(get("experts-adult"), baseline, tmp_path, harness.SETTINGS)
    assert seen == [(0, 1e-3), (0, 3e-3), (0, 1e-2), (0, 3e-2), (0, 1e-1), (1, 3e-2), (2, 3e-2), (3, 3e-2)]
    assert {(r.learning_rate, r.edge, r.tried) for r in lines} == {(3e-2, False, 5)}


def test_the_command_measures_one_method_on_one_network_and_prints_it(tmp_path, capsys):
    options = ["--smoke", "--cache", str(tmp_path), "--out", str(tmp_path)]
    main(["measure", "--half", "both", "--problem", "experts-adult", "--method", "adamw", *options])
    assert "experts-adult: AdamW, lr 1e-3 lr 0.001 seed 1: loss 0." in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no saved runs"):
        main(["tables", "--out", str(tmp_path)])


@pytest.mark.parametrize("module", [problems, training, harness, targets], ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_hold(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
