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


def test_importing_sgdol_and_the_core_imports_no_framework_and_the_optimizer_does_when_it_is_first_used():
    pytest.importorskip("torch")
    program = f"""
    import importlib, sys, sgdol
    def frameworks(): return sorted({{"torch", "jax", "optax"}} & set(sys.modules))
    print(frameworks())
    for name in {CORE!r}:
        assert getattr(sgdol, name).__name__ == importlib.import_module("sgdol." + name).__name__ == "sgdol." + name
    print(frameworks(), sgdol.SGDOL.__module__.partition("._")[0], frameworks())
    """
    assert run(program) == "[]\n[] sgdol.torch ['torch']"


def test_the_pytorch_front_end_loads_little_on_top_of_torch():
    """torch._dynamo alone is 884 modules, and takes as long as torch itself; measured, the front end loads 47."""
    program = """
    import sys, torch
    before = set(sys.modules)
    import sgdol.torch
    print(len(set(sys.modules) - before) < 100, "torch._dynamo" in sys.modules)
    """
    assert run(program) == "True False"


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


ASKS = {
    "torch": [
        "from sgdol import SGDOL",
        "from sgdol import SGDOLFree",
        "import sgdol; sgdol.SGDOL",
        "import sgdol.torch",
    ],
    "jax": ["import sgdol.jax", "from sgdol.jax import sgdol", "from sgdol import jax"],
}


def test_a_front_end_without_its_framework_says_what_to_install():
    """But ``hasattr`` raises nothing: ``inspect.getmembers`` and completion in notebooks walk over all of dir()."""
    program = f"""
    for statement in {[each for statements in ASKS.values() for each in statements]!r}:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sgdol"]:
            del sys.modules[name]
        try:
            exec(statement)
        except ModuleNotFoundError as error:
            print(error.name, error)
    import sgdol
    print([hasattr(sgdol, name) for name in ("jax", "paper")])
    """
    said = [
        f"{who} sgdol.{who} needs {who}, which is not installed: pip install 'sgdol[{who}]'"
        for who, statements in ASKS.items()
        for _ in statements
    ]
    *sentences, asked = run(program, frameworks=False).splitlines()
    assert sentences == said
    assert asked.startswith("[False, ")


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'sgdol' has no attribute 'Adam'"):
        sgdol.Adam  # noqa: B018


def test_dir_lists_the_public_names():
    assert {"SGDOL", "__version__", "torch", *CORE} <= set(dir(sgdol))


def test_the_version_is_that_of_the_distribution():
    assert sgdol.__version__ == importlib.metadata.version("sgdol")
