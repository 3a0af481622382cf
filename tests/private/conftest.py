import pytest

pytest.importorskip("opacus", reason="Opacus is not installed: pip install 'sgdol[private]'")
