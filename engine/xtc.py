"""XTC ("exclude top choices"): now and then the most likely tokens are left out, so that a reply takes another way.

The rule is that of its author (oobabooga/text-generation-webui, pull request 6335): with the probability
xtc_probability, of the tokens that the filters keep, those at least as likely as xtc_threshold are left out, but not
the least likely of them. Chance is the host's, by the request's seed and the token's index; which tokens it hits is
found wherever the logits are. Costs a sort of the rows that are hit.
"""

import hashlib

import torch
from torch import Tensor

from engine.drawing import Filters, kept_weights
from engine.request import SamplingParams

MOST = 0.5  # above it no two tokens are as likely as the threshold


def leaves_out(params: SamplingParams, index: int) -> bool:
    """Whether top choices are left out for token `index` of a reply. Where nothing is drawn, none are."""
    if params.temperature == 0 or params.xtc_probability == 0 or params.xtc_threshold > MOST:
        return False
    digest = hashlib.sha256(b"xtc" + params.seed.to_bytes(8, "little") + index.to_bytes(8, "little")).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53) < params.xtc_probability


def without_top_choices(logits: Tensor, filters: Filters, thresholds: Tensor) -> Tensor:
    """The logits of what is left of each row by its filters and its threshold, float32 [rows, 1]; all else is
    impossible, so that no filter is needed any more. float32 [rows, vocabulary], on the device of the logits."""
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights, places = kept_weights(values, filters), torch.arange(logits.shape[1], device=logits.device)
    likely = (weights >= thresholds * weights.sum(-1, keepdim=True)) & (weights > 0)
    left = (weights > 0) & (places >= likely.sum(-1, keepdim=True) - 1)
    return torch.full_like(logits, -torch.inf).scatter(-1, ids, torch.where(left, values, -torch.inf))
