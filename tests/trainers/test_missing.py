"""A trainer's module without its framework says what to install; without it being asked for, nothing is imported."""

import importlib
import sys

import pytest
from processes import output


@pytest.mark.parametrize(
    ("module", "package"), [("lightning", "lightning"), ("huggingface", "transformers"), ("accelerate", "accelerate")]
)
def test_a_missing_framework_is_named_with_the_extra(monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"sgdol.trainers.{module}", raising=False)
    message = rf"sgdol\.trainers\.{module} needs {package}, which is not installed: pip install 'sgdol\[trainers\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        importlib.import_module(f"sgdol.trainers.{module}")


def test_the_optimizer_imports_no_trainer_and_no_logger():
    program = """
import sys, sgdol, sgdol.trainers
sgdol.SGDOL, sgdol.torch.Log(), sgdol.plot
frameworks = {"lightning", "pytorch_lightning", "transformers", "accelerate", "tensorboard", "matplotlib"}
print(sorted(frameworks & set(sys.modules)))
"""
    assert output([sys.executable, "-c", program]) == "[]\n"
