"""How programs are compiled here, and in which precision."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def compiled_in_a_hurry():
    """There are hundreds of programs here, and each runs for a few steps: optimizing them takes most of the time."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def double_precision():
    import jax

    with jax.enable_x64(True):
        yield
