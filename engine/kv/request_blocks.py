"""RequestBlocks: the KV blocks of one request in every tier. `KVMemory` owns them and finds them by request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.config import BLOCK_SIZE
from engine.kv.blocks import BlockKey
from engine.kv.disk.run_file import DiskBlock
from engine.request import Request


@dataclass(slots=True)
class SavedBlocks:
    """The blocks of a preempted request in the host pools, from which it can resume."""

    num_computed: int
    blocks: tuple[list[tuple[int, int]], ...]  # of each KV group: (block index, block of the host pool)
    is_there: bool = False  # the copy has completed
    is_lost: bool = False  # the copy has failed


@dataclass(slots=True, eq=False)
class RequestBlocks:
    """Block tables and block keys of a request, and its copies in the other tiers."""

    request: Request
    tables: tuple[list[int], ...]  # of each KV group: block ids in order
    keys: list[BlockKey] = field(default_factory=list)  # of its leading full blocks, as far as they were needed
    num_published: int = 0  # leading blocks that are computed and findable
    saved: SavedBlocks | None = None
    files: dict[tuple[int, int], Mapping[BlockKey, DiskBlock]] = field(default_factory=dict)  # by group and segment

    def content(self, index: int) -> tuple[BlockKey, Sequence[int]]:
        """The key and the token ids of a full block."""
        return self.keys[index], self.request.token_ids(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
