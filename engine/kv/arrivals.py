"""Arrivals: requests whose blocks are being copied to the device from the host pools and from files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.cost_model import CostModel
from engine.counters import Counters
from engine.kv.blocks import NULL_BLOCK
from engine.kv.disk.segment_file import DiskBlock
from engine.kv.groups import Group
from engine.kv.host_tier import HostTier
from engine.kv.prefix_cache import Source
from engine.kv.request_blocks import RequestBlocks
from engine.kv.transfers import Arriving, MoveBlock, ReadBlocks, TransferHandle, Transfers
from engine.request import Request

# blocks of one group: (index in the block table, block in the host pool or in a file)
Incoming = Sequence[tuple[int, int | DiskBlock]]


@dataclass(slots=True)
class Arrival:
    """The blocks of one request that are being copied to the device. It is complete when all its copies have ended."""

    held: RequestBlocks
    parts: int  # number of copies under way: at most one from the host pools and one from files
    reads: Sequence[ReadBlocks]
    failed: bool = False
    seconds: float = 0.0  # total time of all copies


class Arrivals:
    """Starts the copies that bring a request's blocks to the device, and reports when the last one has ended."""

    def __init__(
        self, groups: Sequence[Group], transfers: Transfers, host: HostTier, costs: CostModel, counters: Counters
    ) -> None:
        self._groups = groups
        self._transfers = transfers
        self._host = host
        self._costs = costs
        self._counters = counters
        self._under_way: dict[int, Arrival] = {}  # keyed by request id

    def __contains__(self, request: Request) -> bool:
        return request.id in self._under_way

    def bring(self, held: RequestBlocks, blocks: int, sources: Sequence[Mapping[int, Source]], stop: int) -> bool:
        """Start filling a request's tables with `blocks` blocks.

        `sources` maps block indices to their sources, one mapping per group. Other table entries stay null. Returns
        False if the pools lack free blocks for these blocks and for the tokens up to `stop`. The caller must then empty
        the tables.
        """
        incoming: list[list[tuple[int, int | DiskBlock]]] = []
        for group, table, of_group in zip(self._groups, held.tables, sources, strict=True):
            table[:] = [NULL_BLOCK] * (len(of_group) if group.is_state else blocks)
            incoming.append([])
            for index, source in of_group.items():
                at = 0 if group.is_state else index
                if isinstance(source, DiskBlock):
                    incoming[-1].append((at, source))
                elif source[0] is group.pool:
                    group.pool.hold(source[1])
                    table[at] = source[1]
                else:
                    incoming[-1].append((at, source[1]))
        if not all(
            len(new) + group.num_needed(held, stop) <= group.pool.num_free
            for group, new in zip(self._groups, incoming, strict=True)
        ):
            return False
        self._fetch(held, incoming)
        return True

    def finish(self, part: Arriving, handle: TransferHandle) -> Arrival | None:
        """Handle the end of one copy.

        Returns the arrival if this was its last copy and its request has not ended.
        """
        if part.reads:
            self._observe_read(handle)
        elif not self._host.observe(part.moves, handle):
            # Unpublish these blocks: if the request found them again, it would retry the same failing copy forever.
            for move in part.moves:
                self._host.pools[move.group].unpublish(move.source)
        arrival = self._under_way.get(part.held.request.id)
        if arrival is None:
            return None
        arrival.parts -= 1
        if handle.failed:
            arrival.failed = True
        else:
            arrival.seconds += handle.seconds
        return None if arrival.parts else self._under_way.pop(part.held.request.id)

    def drop(self, request: Request) -> None:
        """Forget the arrival of a request that has ended. Its copies continue, but their results are ignored."""
        self._under_way.pop(request.id, None)

    def _fetch(self, held: RequestBlocks, incoming: Sequence[Incoming]) -> None:
        """Allocate blocks for the request's tables, and start copying into them from the host pools and from files."""
        moves: list[MoveBlock] = []
        reads: list[ReadBlocks] = []
        for number, (group, table, blocks) in enumerate(zip(self._groups, held.tables, incoming, strict=True)):
            files: list[tuple[DiskBlock, int]] = []
            for at, source in blocks:
                (table[at],) = group.pool.allocate(1)
                if isinstance(source, DiskBlock):
                    files.append((source, table[at]))
                else:
                    moves.append(MoveBlock(number, source, table[at], to_host=False))
            if files:
                sources, targets = zip(*files, strict=True)
                reads.append(ReadBlocks(number, sources, targets))
        if not moves and not reads:
            return
        held.num_published = 0
        self._under_way[held.request.id] = Arrival(held, bool(moves) + bool(reads), reads)
        if moves:
            self._transfers.move(moves, Arriving(held, moves=moves))
        if reads:
            self._transfers.read(reads, Arriving(held, reads=reads))

    def _observe_read(self, handle: TransferHandle) -> None:
        if handle.failed:
            self._counters.disk_misses += 1
        else:
            self._costs.observe_read(handle.num_bytes, handle.seconds)
            self._counters.disk_read_bytes += handle.num_bytes
