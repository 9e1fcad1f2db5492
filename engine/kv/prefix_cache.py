"""PrefixCache: finds the longest cached prefix of a request that every KV group has, in the pools or in files.

The blocks that it finds are not held. Files are skipped if measurements show that computing is faster than reading.
Imports no torch.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.config import BLOCK_SIZE, EngineConfig
from engine.cost_model import CostModel
from engine.kv.blocks import BlockKey, BlockPool, block_key, root_key
from engine.kv.disk.segment_file import DiskBlock
from engine.kv.disk.tier import DiskTier
from engine.kv.groups import Group
from engine.kv.request_blocks import RequestBlocks
from engine.kv.transfers import PoolBlock
from engine.request import Origin, TokenSources

Source = PoolBlock | DiskBlock


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached prefix of a request."""

    blocks: int
    # one dictionary per group, by block index: the blocks that later tokens attend to
    sources: Sequence[dict[int, Source]]
    skipped: int = 0  # number of further blocks that are in files, but are faster to compute than to read
    junction: int = 0  # number of blocks that all groups without states have

    @property
    def disk_blocks(self) -> list[int]:
        """The number of blocks in files, for each group."""
        return [sum(isinstance(source, DiskBlock) for source in found.values()) for found in self.sources]

    def token_sources(self, device: Sequence[BlockPool]) -> TokenSources:
        """Return the number of tokens that each tier provides, counted in the group that needs the most blocks.

        A block that no later token attends to is counted for the tier of the next block.
        """
        found = {"device": 0, "host": 0, "disk": 0}
        widest = max(self.sources, key=len)
        here: Source | None = None
        for index in range(self.blocks - 1, -1, -1):
            here = widest.get(index, here)
            found[_tier(here, device)] += BLOCK_SIZE
        return TokenSources(**found, skipped=self.skipped * BLOCK_SIZE)


def _tier(source: Source | None, device: Sequence[BlockPool]) -> str:
    if isinstance(source, DiskBlock):
        return "disk"
    return "device" if source is None or source[0] in device else "host"


class PrefixCache:
    """Searches the device pools first, then the host pools, then files."""

    def __init__(
        self, config: EngineConfig, groups: Sequence[Group], host: Sequence[BlockPool], disk: DiskTier, costs: CostModel
    ) -> None:
        self._config = config
        self._groups = groups
        self._pools = [[group.pool, *host[number : number + 1]] for number, group in enumerate(groups)]
        self._disk = disk
        self._costs = costs

    def match(self, held: RequestBlocks, most: int) -> Prefix:
        """Return the longest prefix of a request that every group has, at most `most` blocks."""
        self.extend_keys(held, held.request.num_tokens // BLOCK_SIZE)
        whole = self._match(held, most, files=True)
        read = whole.disk_blocks
        if not any(read):
            return whole
        rest = self._match(held, most, files=False)
        blocks = whole.blocks - rest.blocks
        sizes = [group.block_bytes for group in self._config.groups]
        if self._costs.prefers_read(sum(map(operator.mul, read, sizes)), blocks):
            return whole
        return replace(rest, skipped=blocks)

    def extend_keys(self, held: RequestBlocks, blocks: int) -> None:
        """Compute the keys of the request's first `blocks` blocks, except those that are already known."""
        keys = held.keys
        parent = keys[-1] if keys else root_key(*self._config.cache_salt, held.request.origin.cache_salt)
        for index in range(len(keys), blocks):
            parent = block_key(parent, held.request.token_ids(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE))
            keys.append(parent)

    def keys_of(self, token_ids: Sequence[int], origin: Origin) -> list[BlockKey]:
        """Return the keys of all full blocks of these tokens."""
        key, keys = root_key(*self._config.cache_salt, origin.cache_salt), []
        for stop in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
            key = block_key(key, token_ids[stop - BLOCK_SIZE : stop])
            keys.append(key)
        return keys

    def _match(self, held: RequestBlocks, most: int, *, files: bool) -> Prefix:
        found, blocks, junction = [], most, 0
        for number, group in enumerate(self._groups):  # groups of states are last
            found.append(self._find(number, held, blocks, files=files))
            while not _has_all(group, found[-1], blocks):
                blocks -= 1
            junction = junction if group.is_state else blocks
        while not all(_has_all(group, by_index, blocks) for group, by_index in zip(self._groups, found, strict=True)):
            blocks -= 1
        seen = [
            {index: source for index, source in by_index.items() if index < blocks and group.sees(index, blocks)}
            for group, by_index in zip(self._groups, found, strict=True)
        ]
        return Prefix(blocks, seen, junction=junction)

    def _find(self, number: int, held: RequestBlocks, most: int, *, files: bool) -> dict[int, Source]:
        """Return the sources of a request's first `most` blocks, keyed by block index.

        The search ends at the first missing block that later tokens attend to.
        """
        found: dict[int, Source] = {}
        group, pools = self._groups[number], self._pools[number]
        for index in range(most):
            key, token_ids = held.content(index)
            here: Source | None = next(((pool, block) for pool in pools if (block := pool.find(key, token_ids))), None)
            if here is None and files:
                here = self._disk.find(number, held, index, token_ids)
            if here is not None:
                found[index] = here
            elif group.sees(index, most):
                return found
        return found


def _has_all(group: Group, found: dict[int, Source], blocks: int) -> bool:
    """Whether `found` has all blocks that tokens after the first `blocks` blocks attend to."""
    for index in range(blocks - 1, -1, -1):
        if not group.sees(index, blocks):
            return True
        if index not in found:
            return False
    return True
