"""A small real problem, and an Accelerate without a memory of the test before."""

import pytest
import torch


@pytest.fixture(autouse=True)
def clean_process():
    """Accelerate keeps its configuration in the process, and refuses another one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order: runs are compared by equality
    yield
    torch.set_num_threads(threads)
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(scope="session")
def digits():
    """Images of 64 pixels in [0, 1] and their labels, in an order that is not sorted."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]


@pytest.fixture
def assert_same():
    """Compares models with their buffers, and the optimizers' states, to the last bit."""

    def check(net, opt, other_net, other_opt):
        identical(net.state_dict(), other_net.state_dict(), "model")
        identical(opt.state_dict(), other_opt.state_dict(), "optimizer")

    def identical(value, other, where):
        assert type(value) is type(other), where
        if isinstance(value, dict):
            assert value.keys() == other.keys(), where
            for key in value:
                identical(value[key], other[key], f"{where}, {key}")
        elif isinstance(value, list):
            assert len(value) == len(other), where
            for i, pair in enumerate(zip(value, other, strict=True)):
                identical(*pair, f"{where}, {i}")
        elif isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype, where
            assert torch.equal(value, other), where
        else:
            assert value == other, where

    return check
