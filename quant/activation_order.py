"""Columns that were quantized in the order of their activations: which group each belongs to, and the order by group.

Knows `g_idx`, the tensor in which checkpoints say so: int32 [columns], the group of each column. Canonical forms keep
columns by group, so that a group is a run of columns and its scale is loaded once. The alternative, an index of the
group for each column, would be looked up by every kernel for every column.
"""

import torch
from torch import Tensor


def columns_by_group(g_idx: Tensor, group: int) -> Tensor | None:
    """The columns in the order of their groups, int32 [columns]; None where they are in that order already.

    Every group has `group` columns, and the last one what is left. Raises ValueError, saying what is wrong.
    """
    columns = len(g_idx)
    groups = -(-columns // group)
    lowest, highest = int(g_idx.min()), int(g_idx.max())
    if lowest < 0 or highest >= groups:
        raise ValueError(f"names group {lowest if lowest < 0 else highest} of {groups}")
    counts = torch.bincount(g_idx, minlength=groups)
    expected = torch.full((groups,), group)
    expected[-1] = columns - group * (groups - 1)
    if not torch.equal(counts, expected):
        wrong = int((counts != expected).nonzero()[0])
        raise ValueError(f"puts {int(counts[wrong])} columns into group {wrong} where {int(expected[wrong])} belong")
    order = torch.argsort(g_idx, stable=True)
    return None if torch.equal(order, torch.arange(columns)) else order.int()
