"""What ``import sgdol`` costs and gives, mostly in processes of their own, where nothing is imported yet."""

import importlib.metadata
import sys
import textwrap

import pytest
from processes import output

import sgdol

CORE = ("surrogate", "learners", "theory", "reference")

WITHOUT_FRAMEWORKS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "jax", "jaxlib", "optax"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def run(program: str, *, frameworks: bool = True) -> str:
    """What the program prints, in a fresh interpreter in which torch and jax may be missing."""
    program = ("" if frameworks else WITHOUT_FRAMEWORKS) + textwrap.dedent(program)
    return output([sys.executable, "-c", program]).strip()


@pytest.mark.parametrize("framework", ["torch", "jax", "optax"])
def test_importing_sgdol_does_not_import(framework):
    assert run(f"import sys, sgdol; print({framework!r} in sys.modules)") == "False"


def test_the_pytorch_front_end_loads_little_on_top_of_torch():
    """torch._dynamo alone is 884 modules, and takes as long as torch itself; measured, the front end loads 47."""
    program = """
    import sys, torch
    before = set(sys.modules)
    import sgdol.torch
    print(len(set(sys.modules) - before) < 100, "torch._dynamo" in sys.modules)
    """
    assert run(program) == "True False"


@pytest.mark.parametrize("module", CORE)
def test_the_core_does_not_import_a_framework(module):
    assert run(f"import sys, sgdol.{module}; print(sorted({{'torch', 'jax', 'optax'}} & set(sys.modules)))") == "[]"


def test_the_core_works_where_neither_torch_nor_jax_is_installed():
    program = """
    import numpy as np
    from sgdol import learners, reference, surrogate, theory
    _, u, n = surrogate.statistics(np.array([[1.0, 2.0], [3.0, -1.0]]))
    learner = learners.FTRL()
    state = learner.observe(learner.initial(np.zeros(())), 1.0, u, n, 1.0)
    eta = learner.predict(state, 1.0) / 2
    assert eta == reference.step_size([u], [n], smoothness=2.0, alpha=1.0)
    print(float(theory.regret(np.array([eta]), np.array([u]), np.array([n]), 2.0)) >= 0)
    """
    assert run(program, frameworks=False) == "True"


@pytest.mark.parametrize(
    ("statement", "who", "missing"),
    [
        ("from sgdol import SGDOL", "torch", "torch"),
        ("from sgdol import SGDOLFree", "torch", "torch"),
        ("import sgdol; sgdol.SGDOL", "torch", "torch"),
        ("import sgdol.torch", "torch", "torch"),
        ("from sgdol import torch", "torch", "torch"),
        ("import sgdol.jax", "jax", "jax"),
        ("from sgdol.jax import sgdol", "jax", "jax"),
        ("from sgdol import jax", "jax", "jax"),
    ],
)
def test_a_front_end_without_its_framework_says_what_to_install(statement, who, missing):
    program = f"""
    try:
        {statement}
    except ModuleNotFoundError as error:
        print(error.name, error)
    """
    sentence = f"sgdol.{who} needs {missing}, which is not installed: pip install 'sgdol[{who}]'"
    assert run(program, frameworks=False) == f"{missing} {sentence}"


def test_the_optimizer_is_imported_when_it_is_first_used():
    pytest.importorskip("torch")
    program = """
    import sys, sgdol
    before = "torch" in sys.modules
    optimizer = sgdol.SGDOL
    print(before, "torch" in sys.modules, optimizer.__module__.startswith("sgdol.torch"))
    """
    assert run(program) == "False True True"


def test_from_sgdol_import_gives_the_same_class_as_the_front_end():
    pytest.importorskip("torch")
    from sgdol import SGDOL
    from sgdol.torch import SGDOL as same

    assert SGDOL is same


@pytest.mark.parametrize("module", CORE)
def test_a_module_of_the_core_is_an_attribute(module):
    assert run(f"import sgdol; print(sgdol.{module}.__name__)") == f"sgdol.{module}"


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'sgdol' has no attribute 'Adam'"):
        sgdol.Adam  # noqa: B018


def test_dir_lists_the_public_names():
    assert {"SGDOL", "__version__", "torch", *CORE} <= set(dir(sgdol))


@pytest.mark.parametrize("name", ["jax", "paper"])
def test_asking_for_a_front_end_that_is_not_there_does_not_raise(name):
    """``hasattr``, ``inspect.getmembers`` and completion in notebooks walk over all that dir() lists."""
    assert run(f"import sgdol; hasattr(sgdol, {name!r}); print('fine')", frameworks=False) == "fine"


def test_the_version_is_that_of_the_distribution():
    assert sgdol.__version__ == importlib.metadata.version("sgdol")
