"""In which precision programs run here."""

import pytest


@pytest.fixture
def double_precision():
    import jax

    with jax.enable_x64(True):
        yield
