"""Routing on the reference kernels against the routers of transformers, in 20,000 random cases of each kind."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from engine.kernels.reference import route
from engine.model_config import Routing, Score
from tests.engine.models.expert_families import EXPERT_FAMILIES

CASES = 20_000
EXPERTS, ACTIVE = 16, 4
SIZES = {"hidden_size": EXPERTS, "num_experts_per_tok": ACTIVE}
PLAIN = Routing(EXPERTS, ACTIVE)
SIGMOID = replace(PLAIN, score=Score.SIGMOID)
GLM = replace(SIGMOID, epsilon=1e-20)

# name -> router, family, options of its configuration, routing, whether the choice has a bias
Router = Callable[[Any], nn.Module]
ROUTERS: dict[str, tuple[Router, str, dict[str, Any], Routing, bool]] = {
    "mixtral": (MixtralTopKRouter, "mixtral moe", {"num_local_experts": EXPERTS}, PLAIN, False),
    "granite": (GraniteMoeTopKRouter, "granite moe", {"num_local_experts": EXPERTS}, PLAIN, False),
    "olmoe": (OlmoeTopKRouter, "olmoe", {"num_experts": EXPERTS}, replace(PLAIN, normalized=False), False),
    "qwen2": (Qwen2MoeTopKRouter, "qwen2 moe", {"num_experts": EXPERTS}, replace(PLAIN, normalized=False), False),
    "qwen3": (Qwen3MoeTopKRouter, "qwen3 moe", {"num_experts": EXPERTS, "norm_topk_prob": True}, PLAIN, False),
    "ernie": (Ernie4_5_MoeTopKRouter, "ernie moe", {"moe_num_experts": EXPERTS, "moe_k": ACTIVE}, PLAIN, True),
    "minimax": (MiniMaxM2TopKRouter, "minimax moe", {"num_local_experts": EXPERTS}, SIGMOID, True),
    "glm": (Glm4MoeTopkRouter, "glm moe", {"routed_scaling_factor": 1.0}, GLM, True),
    "glm scaled": (Glm4MoeTopkRouter, "glm moe", {"routed_scaling_factor": 2.5}, replace(GLM, scale=2.5), True),
    "glm not normalized": (
        Glm4MoeTopkRouter, "glm moe", {"routed_scaling_factor": 1.0, "norm_topk_prob": False},
        replace(SIGMOID, normalized=False), True,
    ),
    "glm groups": (
        Glm4MoeTopkRouter, "glm moe", {"routed_scaling_factor": 1.0, "n_group": 4, "topk_group": 2},
        replace(GLM, groups=4, active_groups=2), True,
    ),
    "glm large groups": (
        Glm4MoeTopkRouter, "glm moe", {"routed_scaling_factor": 1.5, "n_group": 2, "topk_group": 1},
        replace(GLM, groups=2, active_groups=1, scale=1.5), True,
    ),
}  # fmt: skip


def their_route(name: str, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the ids in ascending order, and the weights. The router's matrix is the identity."""
    make, family, options, _, _ = ROUTERS[name]
    if "glm" in family:
        options = {"n_routed_experts": EXPERTS} | options
    module = make(EXPERT_FAMILIES[family].config(**(SIZES | options)))
    biases = [it for key, it in module.state_dict().items() if key.endswith("e_score_correction_bias")]
    with torch.no_grad():
        dict(module.named_parameters())["weight"].copy_(torch.eye(EXPERTS))
        for it in biases:
            it.copy_(bias)
        _, weights, ids = module(logits) if biases or bias is None else module(logits, bias)
    order = ids.argsort(dim=-1)
    return ids.gather(1, order), weights.gather(1, order)


def margins(logits: Tensor, routing: Routing, bias: Tensor | None) -> Tensor:
    """Return by how much the last chosen expert or group of each row is ahead of the first one that is not chosen."""
    scores = torch.sigmoid(logits) if routing.score is Score.SIGMOID else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    margin = torch.full((len(logits),), torch.inf)
    if routing.groups > 1:
        sums = choice.view(len(logits), routing.groups, -1).topk(2).values.sum(-1)
        first = sums.sort(-1, descending=True)
        margin = first.values[:, routing.active_groups - 1] - first.values[:, routing.active_groups]
        kept = torch.zeros(sums.shape, dtype=torch.bool).scatter(1, first.indices[:, : routing.active_groups], True)
        choice = choice.where(kept.repeat_interleave(EXPERTS // routing.groups, 1), -torch.inf)
    ranked = choice.sort(-1, descending=True).values
    return margin.minimum(ranked[:, ACTIVE - 1] - ranked[:, ACTIVE])


@pytest.mark.parametrize("name", ROUTERS)
def test_choices_and_weights_equal_transformers(name: str) -> None:
    """Some versions of transformers mask the experts of other groups with 0 instead of -inf. Biases are positive here,
    so that all scores are, and both are equal.
    """
    *_, routing, has_bias = ROUTERS[name]
    torch.manual_seed(1)
    logits = 2 * torch.randn(CASES, EXPERTS)
    bias = 0.3 * torch.rand(EXPERTS) if has_bias else None
    ids, weights = route(logits, routing, bias)
    expected_ids, expected_weights = their_route(name, logits, bias)
    clear = margins(logits, routing, bias) > 1e-6
    assert clear.float().mean() > 0.999
    assert torch.equal(ids[clear], expected_ids[clear])
    torch.testing.assert_close(weights[clear], expected_weights[clear], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score", Score)
@pytest.mark.parametrize("groups", [1, 4])
def test_lower_index_is_chosen_among_equal_scores(score: Score, groups: int) -> None:
    routing = replace(PLAIN, score=score, groups=groups, active_groups=max(1, groups // 2))
    generator = torch.Generator().manual_seed(2)
    logits = torch.randint(0, 3, (500, EXPERTS), generator=generator).float()
    ids, _ = route(logits, routing)
    size = EXPERTS // groups
    for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True):
        members = [range(first, first + size) for first in range(0, EXPERTS, size)]
        # scores have the same order as logits; equal sums may differ by rounding
        sums = [sum(sorted(score_of(row, score)[it] for it in group)[-2:]) for group in members]
        best = sorted(range(groups), key=lambda it: (-round(sums[it], 5), it))[: routing.active_groups]
        allowed = sorted((it for group in best for it in members[group]), key=lambda it: (-row[it], it))
        assert chosen == sorted(allowed[:ACTIVE])


def score_of(row: list[float], score: Score) -> list[float]:
    values = torch.tensor(row)
    found: list[float] = (values.sigmoid() if score is Score.SIGMOID else values.softmax(-1)).tolist()
    return found


@pytest.mark.parametrize("size", [0, 1, 3, 16])
@pytest.mark.parametrize("score", Score)
def test_bits_of_a_row_do_not_depend_on_the_others(size: int, score: Score) -> None:
    routing = replace(PLAIN, experts=12, score=score, normalized=False, groups=4, active_groups=2)
    torch.manual_seed(3)
    logits, bias = torch.randn(480, 12), torch.rand(12)
    whole = route(logits, routing, bias)
    parts = [route(rows, routing, bias) for rows in (torch.split(logits, size) if size else (logits[:0], logits))]
    for ours, found in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(found), ours)


def test_experts_of_other_groups_are_not_chosen_even_if_all_scores_are_negative() -> None:
    routing = Routing(4, 2, Score.SIGMOID, groups=2, active_groups=1)
    ids, _ = route(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), routing, torch.full((4,), -5.0))
    assert ids.tolist() == [[2, 3]]


def test_bias_changes_the_choice_but_not_the_weights() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    routing = Routing(4, 2, Score.SIGMOID, normalized=False)
    ids, weights = route(logits, routing, torch.tensor([0.0, 0.0, 0.0, 9.0]))
    assert ids.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, torch.tensor([[3.0, 0.0]]).sigmoid())
