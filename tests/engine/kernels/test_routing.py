"""The kernel that chooses experts, against its reference implementation."""

from dataclasses import replace

import pytest
import torch

from engine.kernels import reference
from engine.kernels.routing import route
from engine.model_config import Routing, Score

pytestmark = pytest.mark.usefixtures("fenced_memory")

ROUTINGS = {
    "softmax": Routing(20, 4),
    "all experts": Routing(3, 3, normalized=False, scale=2.5),
    "one expert": Routing(1, 1),
    "sigmoid": Routing(16, 6, Score.SIGMOID, epsilon=1e-3, scale=0.5),
    "groups": Routing(24, 5, Score.SIGMOID, groups=6, active_groups=2),
    "groups of one expert": Routing(6, 2, groups=6, active_groups=3),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_experts_and_weights_equal_the_reference(name: str, biased: bool, scaled: bool, device: torch.device) -> None:
    routing = ROUTINGS[name]
    logits = torch.randn(5, routing.experts)
    logits[2:] = logits[2:].round()  # many scores are equal
    bias = torch.randint(-1, 2, (routing.experts,)).float() if biased else None
    scale = torch.randn(routing.experts) if scaled else None
    want_ids, want_weights = reference.route(logits, routing, bias, scale)
    vectors = (None if it is None else it.to(device) for it in (bias, scale))
    ids, weights, shared = route(logits.to(device), routing, *vectors)
    assert torch.equal(ids.cpu().long(), want_ids)
    torch.testing.assert_close(weights.cpu(), want_weights)
    assert shared is None


def test_last_logit_is_the_weight_of_the_shared_mlp(device: torch.device) -> None:
    routing, wide = Routing(7, 2), torch.randn(3, 11)
    logits = wide[:, :8]
    ids, weights, shared = route(logits.to(device), routing)
    want_ids, want_weights = reference.route(logits[:, :7], routing)
    assert torch.equal(ids.cpu().long(), want_ids)
    torch.testing.assert_close(weights.cpu(), want_weights)
    assert shared is not None
    torch.testing.assert_close(shared.cpu(), logits[:, 7].sigmoid())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["softmax", "groups"])
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_ids_are_valid_and_distinct_for_any_logits(name: str, bad: float, device: torch.device) -> None:
    routing = replace(ROUTINGS[name], active=ROUTINGS[name].experts // 2)
    logits = torch.randn(3, routing.experts)
    logits[0], logits[1, 1:] = bad, bad
    logits[2, 3] = bad
    bias = torch.full((routing.experts,), bad)
    both = torch.cat([route(logits.to(device), routing, it)[0] for it in (None, bias.to(device))])
    for row in both.tolist():
        assert row == sorted(set(row))
        assert len(row) == routing.active
        assert 0 <= row[0] <= row[-1] < routing.experts


def test_no_tokens_have_no_experts(device: torch.device) -> None:
    assert route(torch.empty(0, 8, device=device), Routing(8, 2))[0].shape == (0, 2)
