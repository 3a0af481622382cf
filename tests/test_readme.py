"""What a newcomer copies from the README runs."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)


def what_a_script_has() -> dict[str, object]:
    """The names that somebody's own training script has defined before it comes to the optimizer."""
    torch.manual_seed(0)
    return {
        "model": torch.nn.Linear(10, 1),
        "loader": [(torch.randn(32, 10), torch.randn(32, 1)) for _ in range(3)],
        "criterion": torch.nn.MSELoss(),
        "evaluate": lambda model: model.eval(),
    }


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[0] for block in BLOCKS])
def test_examples_in_the_readme_run(block, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the whole program saves what it has trained
    exec(compile(block, "README.md", "exec"), what_a_script_has())


def test_the_readme_names_files_that_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
