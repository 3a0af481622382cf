"""The private benchmark keeps its budget and reports the runs that it says."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def imported():
    """When the first test runs, not when tests are collected: Opacus and what it needs take a second."""
    global private, private_local
    pytest.importorskip("opacus", reason="Opacus is not installed: pip install 'sgdol[private]'")
    from benchmarks import private, private_local


@pytest.mark.parametrize(("method", "runs"), [("SGDOL", 1), ("DP-SGD, paid", 4)])
def test_all_the_runs_that_are_paid_for_stay_within_epsilon(method, runs):
    found = private.run("digits", 3.0, method, 3.0, seed=0, runs_paid=runs)
    assert 2.9 < found["spent"] <= 3.0
    assert found["test"] > 0.5


def made_up():
    """The plan's runs with accuracies that grow with the rate, but for the validation of the largest rate."""
    rows = []
    for data, epsilon, method, lr, seed, _ in private.plan(2):
        test = 0.5 + 0.01 * seed + 0.001 * lr
        validation = 0.1 if lr == 30.0 else test
        row = {"data": data, "epsilon": epsilon, "method": method, "lr": lr, "seed": seed, "test": test}
        rows.append({k: str(v) for k, v in {**row, "validation": validation, "spent": epsilon}.items()})
    return rows


def test_tuned_lines_choose_by_validation_and_report_the_test_accuracy():
    rows = private.cell(made_up(), "digits", 1.0)
    found = private.columns(rows, "digits")
    assert [float(r["lr"]) for r in found["DP-SGD, tuned, not counted"]] == [10.0, 10.0]
    assert [float(r["lr"]) for r in found["DP-Adam, tuned, not counted"]] == [0.1, 0.1]
    assert private.summary(found["DP-SGD, tuned, not counted"])[0] == pytest.approx(51.5)
    assert {len(some) for some in found.values()} == {2}


def test_a_seed_that_was_interrupted_is_left_out():
    rows = made_up()
    assert private.whole_seeds(rows) == rows
    assert {r["seed"] for r in private.whole_seeds(rows[:-1])} == {"0"}


def test_the_local_noise_gives_the_epsilon_that_was_asked_for():
    for epsilon in private_local.EPSILONS:
        spent = private_local.local_epsilon(private_local.noise_for(epsilon), private.DELTA)
        assert 0.99 * epsilon < spent <= epsilon
