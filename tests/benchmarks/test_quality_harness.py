"""Budgets, tuning, the cache and the tables of the quality suite."""

import dataclasses
import json
import math

import pytest
import torch
from benchmarks.quality import (
    Method,
    contenders,
    digest,
    figure,
    get_method,
    get_problem,
    methods,
    page,
    problems,
    run,
    tables,
    training,
)
from benchmarks.quality.__main__ import main
from benchmarks.quality.harness import Cache, Line, Settings, measure, measure_all, tune

QUICK = Settings(seeds=(1, 2), grid=(-3, -2), extensions=1, shorten=40.0)


class TwiceSGD(torch.optim.SGD):
    """Looks at every third batch a second time, as an optimizer with look-backs does."""

    calls = 0

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
            self.calls += 1
            if self.calls % 3 == 0:
                closure()
        super().step()
        return loss

    def averaged(self):
        raise AssertionError("never asked for: averaging is 'none'")


# One training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "sgdol", "schedulefree-adamw", "dog", "prodigy"])
def test_every_method_spends_exactly_the_budget(name):
    rate = None if name in ("dog", "prodigy") else 0.1
    result = run(get_problem("logistic-cancer"), get_method(name), seed=1, rate=rate, budget=50)
    assert (result.evaluations, result.steps) == (50, 50)


def test_the_budget_is_the_problems_if_none_is_given():
    problem = get_problem("quadratic-additive-1e2")
    assert run(problem, get_method("sgd"), seed=1, rate=0.01).evaluations == problem.budget


def test_the_microbatches_of_a_step_are_one_evaluation_and_a_look_back_another():
    problem = get_problem("logistic-cancer")
    once = Method("once", "torch.optim:SGD", parts=2, rate="gradient")
    assert run(problem, once, 1, 0.1, budget=30).steps == 30
    twice = Method("twice", f"{__name__}:TwiceSGD", parts=2, rate="gradient", closure=True)
    result = run(problem, twice, 1, 0.1, budget=40)
    assert (result.evaluations, result.steps) == (40, 30)  # 30 steps and 10 second looks


def test_sgdol_without_m_counts_its_look_backs():
    result = run(get_problem("logistic-cancer"), get_method("sgdol-free"), 1, budget=60)
    assert 60 <= result.evaluations <= 62
    assert result.steps < 60


def test_a_run_is_a_plain_loop_over_the_drawn_batches():
    problem = get_problem("mlp-digits")
    result = run(problem, get_method("sgd"), seed=2, rate=0.1, budget=25)
    instance = problem.make(seed=2, steps=25)
    optimizer = torch.optim.SGD(instance.parameters(), lr=0.1, momentum=0.9)
    for step in range(25):
        optimizer.zero_grad()
        instance.loss(step).backward()
        optimizer.step()
    assert result.outcomes["last"].gap == instance.gap(instance.objective.evaluate())


def test_the_harness_average_is_the_polynomial_average_of_the_optimizer_and_of_dog():
    """One formula, three implementations: on the same iterates they give the same point."""
    problem = get_problem("quadratic-additive-1e2")
    gaps = {}
    for who in ("harness", "dog"):
        method = Method("m", "torch.optim:SGD", {"momentum": 0.0}, rate="gradient", averaging=who, parts=2)
        gaps[who] = run(problem, method, 1, 0.1, budget=50).outcomes["average"].gap
    # kappa so large that SGDOL's multiplier stays 1: SGD with the same rate.
    options = {"momentum": 0.0, "kappa": 1e12, "averaging": 8.0}
    ours = Method("o", "sgdol:SGDOL", options, "sgdol", "gradient", None, 2, averaging="optimizer")
    gaps["optimizer"] = run(problem, ours, 1, 0.1, budget=50).outcomes["average"].gap
    assert gaps["dog"] == pytest.approx(gaps["harness"], rel=1e-12)
    assert gaps["optimizer"] == pytest.approx(gaps["harness"], rel=1e-9)


def test_a_diverged_run_has_the_starting_gap():
    problem = get_problem("rosenbrock-10d")
    result = run(problem, get_method("sgd"), seed=1, rate=10.0)
    assert result.outcomes["last"] == training.Outcome(gap=result.start, accuracy=None, validation=None, diverged=True)
    assert result.start == 9.0
    assert result.evaluations < 20  # nothing finite is left: it stops


def test_a_run_above_its_start_has_diverged_although_it_is_finite():
    problem = get_problem("quadratic-additive-1e2")
    result = run(problem, get_method("sgd-plain"), seed=1, rate=2.2, budget=20)
    assert result.outcomes["last"].diverged
    assert result.outcomes["last"].gap == result.start


def test_a_solved_problem_has_the_floor():
    problem = get_problem("quadratic-multiplicative-1e3")
    easy = dataclasses.replace(problem, options={**problem.options, "condition": 1.0, "dimension": 2, "batch": 64})
    result = run(easy, get_method("sgd-plain"), seed=1, rate=1.0, budget=200)
    assert result.outcomes["last"].gap == 1e-6 * result.start
    assert not result.outcomes["last"].diverged


def test_schedule_free_is_evaluated_in_its_eval_mode():
    problem = get_problem("quadratic-additive-1e2")
    result = run(problem, get_method("schedulefree-sgd"), seed=1, rate=0.5, budget=100)
    instance = problem.make(seed=1, steps=100)
    from schedulefree import SGDScheduleFree

    optimizer = SGDScheduleFree(instance.parameters(), lr=0.5)
    optimizer.train()
    for step in range(100):
        optimizer.zero_grad()
        instance.loss(step).backward()
        optimizer.step()
    in_training = instance.gap(instance.objective.evaluate())
    optimizer.eval()
    assert result.outcomes["last"].gap == instance.gap(instance.objective.evaluate()) != in_training


def test_running_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    run(get_problem("mlp-digits-dropout"), get_method("sgd"), 1, 0.1, budget=5)
    assert torch.equal(torch.rand(3), expected)


# Tuning and the cache -------------------------------------------------------------------------------------------------


def test_tuning_finds_the_best_inside_the_grid_and_grows_it_at_an_edge():
    seen = []

    def score(rate):
        seen.append(rate)
        return abs(math.log10(rate) - 3)

    assert tune(score, unit=1.0, settings=Settings()) == (1e3, False)
    assert seen == [1e-2, 1e-1, 1.0, 10.0, 100.0, 1e3, 1e4]


def test_tuning_goes_down_if_everything_diverged_and_says_that_it_is_at_an_edge():
    rate, edge = tune(lambda rate: math.inf if rate > 2e-5 else 1.0, 1.0, Settings())
    assert (rate, edge) == (1e-6, True)
    rate, edge = tune(lambda rate: rate, 1.0, Settings())
    assert (rate, edge) == (1e-6, True)


def measured(folder, jobs=1, saved=(), package=None):
    suite = [get_problem(n) for n in ("rosenbrock-2d", "quadratic-additive-1e2")]
    chosen = [c for c in contenders() if c.method.name in ("sgd", "dog", "sgdol")]
    chosen = [c for c in chosen if package in (None, c.method.package)]
    return measure_all(suite, chosen, folder, QUICK, jobs, saved, report=lambda text: None)


def test_a_second_measurement_comes_from_the_cache_and_is_the_same(tmp_path, monkeypatch):
    first = measured(tmp_path)
    monkeypatch.setattr(training, "run", never)
    assert measured(tmp_path) == first


def test_a_torn_file_of_the_cache_is_run_again(tmp_path):
    first = measured(tmp_path)
    files = sorted(tmp_path.rglob("*.json"))
    files[0].write_text(files[0].read_text()[:40])
    files[1].unlink()
    assert measured(tmp_path) == first
    assert json.loads(files[0].read_text())["about"]["problem"]


def test_another_option_seed_rate_or_budget_is_another_run(tmp_path):
    cache, problem, method = Cache(tmp_path), get_problem("rosenbrock-2d"), get_method("sgd")
    asked = [(1, 0.1, 50), (2, 0.1, 50), (1, 0.2, 50), (1, None, 50), (1, 0.1, 51)]
    paths = {cache.path(problem, method, *each) for each in asked}
    paths.add(cache.path(problem, dataclasses.replace(method, options={"momentum": 0.5}), *asked[0]))
    for change in ({"options": {"dimension": 3, "sigma": 0.2}}, {"loss_scale": 2.0}):
        paths.add(cache.path(dataclasses.replace(problem, **change), method, *asked[0]))
    assert len(paths) == 8


def test_contenders_of_one_training_share_its_runs(tmp_path):
    cache, problem = Cache(tmp_path), get_problem("rosenbrock-2d")
    last, average = (c for c in contenders() if c.method.name == "sgd")
    measure(problem, last, cache, QUICK)
    before = len(list(tmp_path.rglob("*.json")))
    lines = measure(problem, average, cache, QUICK)
    assert len(list(tmp_path.rglob("*.json"))) == before or lines[0].learning_rate != 1e-3
    assert {line.point for line in lines} == {"average"}


def never(*arguments, **options):
    raise AssertionError("ran again")


def test_saved_lines_of_which_nothing_changed_are_not_run_again(tmp_path, monkeypatch):
    first = measured(tmp_path / "once")
    tables.write_runs(tmp_path / "saved.csv", first)
    saved = tables.read_runs(tmp_path / "saved.csv")
    monkeypatch.setattr(training, "run", never)
    again = measured(tmp_path / "empty", saved=[r for r in saved if r.method != "sgdol"], package="torch")
    assert [(r.contender, r.seed) for r in again] == [(r.contender, r.seed) for r in first if r.method == "sgd"]
    with pytest.raises(AssertionError, match="ran again"):
        measured(tmp_path / "empty", saved=[dataclasses.replace(r, digest="other") for r in saved], package="torch")


def test_a_digest_knows_the_code_of_its_own_problem_and_no_other():
    problem = get_problem("gru-adding")
    reached = digest.reached([problem.build])
    assert {name.rpartition(".")[2] for name in reached} >= {"adding", "Recurrent", "GATES", "Supervised", "Finite"}
    assert not any("Classifier" in name or "transformer" in name.lower() for name in reached)
    data_of = {n for n in digest.reached([get_problem("adapters-digits").build]) if ".data." in n}
    assert data_of >= {"benchmarks.quality.data.digits", "benchmarks.quality.data.mnist"}


def test_comments_and_docstrings_are_no_part_of_a_digest():
    def plain():
        return 1

    first = digest.source(plain)

    def plain():
        """Which is one."""
        return 1  # as said

    assert digest.source(plain) == first == "def plain():\n    return 1"


@pytest.mark.slow
def test_two_processes_give_the_same_table_as_one(tmp_path):
    assert measured(tmp_path / "two", jobs=2) == measured(tmp_path / "one")


def test_dog_starts_as_its_documentation_says_for_batchnorm():
    dog = get_method("dog")
    assert dog.on("cnn") == dog
    assert dog.on("resnet").make([torch.nn.Parameter(torch.ones(1))], None).param_groups[0]["reps_rel"] == 1e-4


# Tables ---------------------------------------------------------------------------------------------------------------


def line(contender, problem, seed, gap, group=tables.TUNED, kind="mlp", **more):
    plain = Line(
        half="development", problem=problem, kind=kind, contender=contender, group=group, method="m", point="last",
        learning_rate=0.1, edge=False, seed=seed, gap=gap, start=100.0, constant=50.0, accuracy=0.5, validation=None,
        diverged=False, evaluations=110, steps=100, digest="",
    )  # fmt: skip
    return dataclasses.replace(plain, **more)


def both(contender, problem, gaps, group=tables.TUNED):
    """With two seeds."""
    return [line(contender, problem, seed, gap, group) for seed, gap in enumerate(gaps, start=1)]


BY_HAND = [
    *both("SGD", "p", (1.0, 4.0)),  # geometric mean 2: the best tuned of p
    *both("SGD", "q", (8.0, 8.0)),
    *both("Adam", "p", (4.0, 4.0)),
    *both("Adam", "q", (2.0, 8.0)),  # geometric mean 4: the best tuned of q
    *both("Free", "p", (1.0, 1.0), tables.FREE),
    line("Free", "q", 1, 16.0, tables.FREE),
    line("Free", "q", 2, 100.0, tables.FREE, diverged=True, accuracy=None),
]


def test_ratios_are_to_the_best_tuned_contender_of_each_problem():
    r = tables.ratios(BY_HAND)
    assert r["SGD"] == {"p": {1: 0.5, 2: 2.0}, "q": {1: 2.0, 2: 2.0}}
    assert r["Free"] == {"p": {1: 0.5, 2: 0.5}, "q": {1: 4.0, 2: 25.0}}  # what is not tuned may be better than 1


def test_the_summary_is_what_a_hand_computes():
    free, best, _ = tables.summarise(BY_HAND, "development")
    assert free.contender == "Free"
    assert free.geometric_mean == pytest.approx((0.5 * 0.5 * 4 * 25) ** 0.25)
    assert (free.low, free.high) == pytest.approx(((0.5 * 4) ** 0.5, (0.5 * 25) ** 0.5))
    assert (free.worst, free.worst_problem) == (pytest.approx(10.0), "q")
    assert (free.diverged, free.runs, free.problems) == (1, 4, 2)
    assert free.accuracy == pytest.approx((0.5 * 3 + 0.1) / 4)
    assert free.extra == pytest.approx(0.1)
    assert best.geometric_mean <= 2**0.5 + 1e-12


def test_effects_compare_two_contenders_run_by_run():
    lines = [
        *(line("SGDOL", "p", s, g) for s, g in ((1, 2.0), (2, 8.0))),
        *(line("SGDOL + averaging", "p", s, g) for s, g in ((1, 1.0), (2, 1.0))),
    ]
    rows = tables.effects(lines, "development")
    assert rows[0] == "| adding | all | mlp |"
    assert rows[2:] == ["| averaging, to SGDOL | 0.25 | 0.25 |"]  # sqrt(1/2 * 1/8)


def test_verdicts_say_who_is_better():
    rows = tables.summarise(
        [
            line(methods.OURS_FREE, "p", 1, 3.0, tables.FREE, accuracy=0.9),
            line("Prodigy", "p", 1, 2.0, tables.FREE, accuracy=0.8),
            line(methods.OURS, "p", 1, 1.0),
            line("Adam + averaging", "p", 1, 1.5),
        ],
        "development",
    )
    said = page.verdicts(rows)
    assert [v.split(":")[0] for v in said] == [
        "- Does not hold", "- Does not hold", "- Holds", "- Holds", "- Does not hold", "- Holds",
    ]  # fmt: skip
    assert "Prodigy (2.00)" in said[0]
    assert "validation rank (1.0)" in said[2]
    assert "2.00 times" in said[4]


def test_a_problem_is_failed_if_most_of_its_runs_are_no_better_than_a_constant_predictor():
    lines = [
        *(line("Adam", "p", seed, gap) for seed, gap in enumerate([49.6, 60.0, 1.0])),  # of 50: two of three failed
        *(line("Adam", "q", seed, gap) for seed, gap in enumerate([49.4, 49.0, 60.0])),  # one of three
        line("SGD", "p", 0, 100.0, diverged=True, constant=200.0),
    ]
    failed = {row.contender: row.failed for row in tables.summarise(lines, "development")}
    assert failed == {"Adam": 1, "SGD": 1}


def test_ranks_are_by_accuracy_or_loss_on_kept_samples_and_the_diverged_are_last():
    lines = [
        *(line(c, "classes", 1, 1.0, accuracy=a) for c, a in (("a", 0.9), ("b", 0.9), ("c", 0.2))),
        *(line(c, "losses", 1, 1.0, accuracy=None, validation=v) for c, v in (("a", 5.0), ("b", 2.0), ("c", None))),
        *(line(c, "nothing kept", 1, 1.0, accuracy=None) for c in "abc"),
    ]
    assert tables.ranks(lines) == {"a": (1.5 + 2) / 2, "b": (1.5 + 1) / 2, "c": 3.0}


def test_a_contender_that_was_not_run_on_every_problem_is_named_and_not_compared():
    lines = [line("Adam", "p", 1, 1.0), line("Adam", "q", 1, 1.0), line("SGD", "p", 1, 0.1)]
    kept, partial = tables.complete(lines, "development")
    assert ({r.contender for r in kept}, partial) == ({"Adam"}, ["SGD"])
    assert "Left out, because not run on all problems: SGD." in page.markdown(lines, {})


def test_runs_survive_being_written_and_read(tmp_path):
    tables.write_runs(tmp_path / "runs.csv", BY_HAND)
    assert tables.read_runs(tmp_path / "runs.csv") == BY_HAND


def test_a_profile_counts_problems():
    assert figure.profile([4.0, 1.0, 2.0, 2.0]) == ([1.0, 2.0, 2.0, 4.0], [0.25, 0.5, 0.75, 1.0])


def test_tables_and_plot_are_made_from_saved_runs_and_are_the_same_each_time(tmp_path, capsys):
    tables.write_runs(tmp_path / "quality-runs-development.csv", BY_HAND)
    main(["tables", "--out", str(tmp_path)])
    made = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert set(made) == {
        "quality-runs-development.csv", "quality.md", "quality.csv", "quality-profile.png", "quality-profile.svg",
    }  # fmt: skip
    assert "| Free | 2.24 |" in made["quality.md"].decode()
    main(["tables", "--out", str(tmp_path)])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == made
    assert "Free" in capsys.readouterr().out


def test_lines_of_a_package_that_is_left_out_stay_as_they_are_saved(tmp_path, monkeypatch):
    suite = tuple(map(get_problem, ("rosenbrock-10d", "logistic-cancer", "mlp-digits")))  # also those of the probes
    few = [c for c in contenders() if c.label in ("SGD", "SGDOL")]
    monkeypatch.setattr(problems, "suite", lambda: suite)
    monkeypatch.setattr(methods, "contenders", lambda: few)
    arguments = f"measure --half development --smoke --cache {tmp_path}/runs --out {tmp_path}".split()
    main(arguments)
    saved = tmp_path / "quality-runs-development.csv"
    by_hand = [dataclasses.replace(r, gap=0.5) if r.contender == "SGDOL" else r for r in tables.read_runs(saved)]
    tables.write_runs(saved, by_hand)
    main([*arguments, "--without-package", "sgdol"])
    assert tables.read_runs(saved) == by_hand
    main(arguments)
    assert tables.read_runs(saved) != by_hand


def test_the_half_has_to_be_named(capsys):
    with pytest.raises(SystemExit):
        main(["measure"])
    assert "--half" in capsys.readouterr().err


def test_a_method_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="not known or not installed: sdg"):
        main(["measure", "--half", "development", "--method", "sdg", "--cache", str(tmp_path)])
