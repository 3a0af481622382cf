import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """As the harness runs: on one thread, whose sums are the same each time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
