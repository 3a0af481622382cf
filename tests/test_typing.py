"""Type checkers and editors see the public names."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "typing" / "what_users_write.py"


@pytest.mark.parametrize(
    "checker",
    [
        ["mypy", "--strict", "--allow-untyped-calls", "--no-error-summary"],
        ["basedpyright", "--level", "error", "--pythonpath", sys.executable],
    ],
    ids=lambda command: command[0],
)
def test_a_users_program_has_no_type_errors(checker, tmp_path):
    pytest.importorskip(checker[0])
    module, *options = checker
    copy = tmp_path / PROGRAM.name  # outside of the repository: its own settings do not apply
    copy.write_text(PROGRAM.read_text())
    run = subprocess.run(
        [sys.executable, "-m", module, *options, str(copy)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
