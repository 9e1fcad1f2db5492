"""The sum of the outputs of experts, against its reference implementation."""

import pytest
import torch

from engine.kernels import reference
from engine.kernels.expert_sum import expert_sum

pytestmark = pytest.mark.usefixtures("fenced_memory")


@pytest.mark.parametrize("shared", ["no", "plain", "weighted"])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("width", "biased"), [(48, False), (1040, True)])
def test_sum_equals_the_reference(width: int, biased: bool, adds: bool, shared: str, device: torch.device) -> None:
    tokens, active = 3, 5
    outputs, weights = torch.randn(tokens * active, width), torch.rand(tokens, active)
    more = None if shared == "no" else torch.randn(tokens, width)
    shared_weights = torch.rand(tokens) if shared == "weighted" else None
    stream = torch.randn(tokens, width)
    biases = torch.randn(8, width) if biased else None
    experts = torch.randint(8, (tokens, active), dtype=torch.int32)
    want = reference.expert_sum(outputs, weights, more, shared_weights, biases, experts)
    given = [None if it is None else it.to(device) for it in (more, shared_weights, biases, experts)]
    add_to = stream.clone().to(device) if adds else None
    got = expert_sum(outputs.to(device), weights.to(device), given[0], given[1], add_to, given[2], given[3])
    if add_to is not None:
        assert got is add_to
        torch.testing.assert_close(got.cpu(), stream + want, rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(got.float().cpu(), want, rtol=1e-2, atol=1e-2)


def test_outputs_are_added_in_order(device: torch.device) -> None:
    """The first two outputs cancel before the small one is added. In any other order, it is lost."""
    outputs = torch.tensor([1e8, -1e8, 1.0]).repeat_interleave(16).view(3, 16)
    got = expert_sum(outputs.to(device), torch.ones(1, 3, device=device), add_to=torch.zeros(1, 16, device=device))
    assert torch.equal(got.cpu(), torch.ones(1, 16))
