"""Choose the experts of each token from the logits of a router. Reference implementation: `reference.route`.

A program chooses the experts of one token. The lower bound is reading the logits, 4 bytes per expert and token: 2 MB
for 4096 tokens and 128 experts, or 0.6 us on an H100. A launch takes longer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model_config import Routing, Score

# Chosen experts have -inf. All others have finite numbers, also where the logits are NaN, so that no expert is chosen
# twice and every id is in range.
LEAST = tl.constexpr(-3.0e38)
OUTSIDE_GROUPS = tl.constexpr(-3.2e38)
WIDE = 1024  # logits, from which a program has several warps


@triton.jit
def _finite(values: tl.tensor) -> tl.tensor:
    return tl.where(values > LEAST, values, LEAST)


@triton.jit
def _best_groups(
    choice: tl.tensor, group: tl.tensor, groups: tl.tensor, active_groups: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return whether each expert is in one of the groups whose two largest scores have the largest sums."""
    expert = tl.arange(0, BLOCK)
    sums = tl.full((BLOCK,), -float("inf"), tl.float32)
    for number in range(groups):
        own = tl.where(group == number, choice, -float("inf"))
        first = tl.max(own, 0)
        second = tl.max(tl.where(expert == tl.argmax(own, 0), -float("inf"), own), 0)
        both = tl.where(second == -float("inf"), first, first + second)  # a group may have one expert
        sums = tl.where(expert == number, tl.where(both > LEAST, both, LEAST), sums)
    kept = group < 0
    for _ in range(active_groups):
        best = tl.argmax(sums, 0)
        kept = kept | (group == best)
        sums = tl.where(expert == best, -float("inf"), sums)
    return kept


@triton.jit(do_not_specialize=["stride", "experts", "active", "groups", "active_groups"])
def _route_kernel(
    logits: tl.tensor,
    choice_bias: tl.tensor,
    expert_scale: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    shared: tl.tensor,
    stride: tl.tensor,
    experts: tl.tensor,
    active: tl.tensor,
    groups: tl.tensor,
    active_groups: tl.tensor,
    epsilon: tl.tensor,
    scale: tl.tensor,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < experts
    own = tl.load(logits + token * stride + expert, mask=inside, other=-float("inf"))
    if SIGMOID:
        scores = tl.sigmoid(own)
    else:
        powers = tl.exp(own - tl.max(own, 0))
        scores = powers / tl.sum(powers, 0)
    choice = scores
    if choice_bias is not None:
        choice += tl.load(choice_bias + expert, mask=inside, other=0.0)
    choice = tl.where(inside, _finite(choice), -float("inf"))
    if GROUPED:
        group = tl.where(inside, expert // (experts // groups), -1)
        kept = _best_groups(choice, group, groups, active_groups, BLOCK)
        choice = tl.where(kept | (expert >= experts), choice, OUTSIDE_GROUPS)
    chosen = tl.zeros((BLOCK,), tl.int32)
    for _ in range(active):
        best = expert == tl.argmax(choice, 0)  # the lowest index of equal values
        chosen = tl.where(best, 1, chosen)
        choice = tl.where(best, -float("inf"), choice)
    own_weights = tl.where(chosen != 0, scores, 0.0)
    if NORMALIZED:
        own_weights = own_weights / (tl.sum(own_weights, 0) + epsilon)
    if expert_scale is not None:
        own_weights *= tl.load(expert_scale + expert, mask=inside, other=0.0)
    at = token * active + tl.cumsum(chosen, 0) - 1
    tl.store(ids + at, expert, mask=chosen != 0)
    tl.store(weights + at, own_weights * scale, mask=chosen != 0)
    if shared is not None:
        tl.store(shared + token, tl.sigmoid(tl.load(logits + token * stride + experts)))


def route(
    logits: Tensor, routing: Routing, choice_bias: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the experts of each token in ascending order, their weights, and the weight of the shared MLP.

    logits: float32 [tokens, experts], or [tokens, experts + 1] if the last one is of the shared MLP, whose weight is
    its sigmoid; otherwise the third result is None. choice_bias and expert_scale, the factors of weights: float32
    [experts]. Returns int32 and float32 [tokens, active], and float32 [tokens]. Ids are valid for any logits.
    """
    tokens, width = logits.shape
    ids = torch.empty(tokens, routing.active, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, routing.active, dtype=torch.float32, device=logits.device)
    gates_shared = width > routing.experts
    shared = torch.empty(tokens, dtype=torch.float32, device=logits.device) if gates_shared else None
    if not tokens:
        return ids, weights, shared
    block = triton.next_power_of_2(routing.experts)
    _route_kernel[tokens,](
        logits,
        choice_bias,
        expert_scale,
        ids,
        weights,
        shared,
        logits.stride(0),
        routing.experts,
        routing.active,
        routing.groups,
        routing.active_groups,
        float(routing.epsilon),
        float(routing.scale),
        SIGMOID=routing.score is Score.SIGMOID,
        NORMALIZED=routing.normalized,
        GROUPED=routing.groups > 1,
        BLOCK=block,
        num_warps=4 if block >= WIDE else 1,
    )
    return ids, weights, shared
