"""The workflows cannot run here; what they rely on can be looked at."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
TARGETS = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)}


@pytest.fixture(params=WORKFLOWS)
def workflow(request):
    return yaml.safe_load(WORKFLOWS[request.param].read_text(encoding="utf-8"))


def steps(job):
    return job.get("steps", [])


def commands(job):
    """What a job runs, once for each entry of its matrix."""
    targets = job.get("strategy", {}).get("matrix", {}).get("target", [""])
    return [
        step["run"].replace("${{ matrix.target }}", name) for step in steps(job) if "run" in step for name in targets
    ]


def test_there_is_one_for_tests_docs_and_releases():
    assert {*WORKFLOWS} == {"tests", "docs", "release"}


def test_every_make_target_that_a_workflow_names_exists(workflow):
    named = {command.split()[1] for job in workflow["jobs"].values() for command in commands(job)}
    assert named <= TARGETS


def test_every_make_target_that_ci_names_exists():
    named = {*re.findall(r"^make ([\w-]+)", (ROOT / ".ci/run").read_text(encoding="utf-8"), flags=re.M)}
    assert {"lint", "test", "docs"} <= named <= TARGETS


def test_a_workflow_may_only_read_and_jobs_get_what_they_need(workflow):
    assert workflow["permissions"] == {"contents": "read"}
    more = {name: {*job["permissions"]} for name, job in workflow["jobs"].items() if "permissions" in job}
    assert more in ({}, {"deploy": {"pages", "id-token"}}, {"publish": {"id-token"}})


def test_every_action_has_a_version(workflow):
    used = [step["uses"] for job in workflow["jobs"].values() for step in steps(job) if "uses" in step]
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d+|release/v\d+)", name) for name in used), used


def test_nothing_is_published_that_was_not_tested_and_tried():
    jobs = yaml.safe_load(WORKFLOWS["release"].read_text(encoding="utf-8"))["jobs"]
    assert {*jobs["publish"]["needs"]} == {"tests", "build"}
    assert any("release-check" in command for command in commands(jobs["build"]))


def test_the_build_is_told_what_the_metadata_hook_asks_for():
    jobs = yaml.safe_load(WORKFLOWS["release"].read_text(encoding="utf-8"))["jobs"]
    told = {name for step in steps(jobs["build"]) for name in step.get("env", {})}
    assert told == {*re.findall(r"SGDOL_[A-Z]+", (ROOT / "hatch_build.py").read_text(encoding="utf-8"))}
