"""The hash model: an engine backend whose next token is a digest of everything it attends to.

A slot of its cache holds a digest of a token, its position, and the slot before it. The next token is a digest of all
slots, read through the block table. So one wrong, stale, missing, or misplaced block changes the output. The correct
output is a function of the prompt, so it can be computed without running the engine. There may also be groups of layers
with a window, which see only the last slots, and recurrent groups, whose state is a digest of all tokens.

Like a device, the model runs some steps when they are launched, and others only when they are collected. Copies between
pools also run late, in any order.
"""

import hashlib
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from engine.config import BLOCK_SIZE, EngineConfig, GroupConfig, Preemption, Restore
from engine.core import Engine
from engine.kv.blocks import NULL_BLOCK, BlockKey
from engine.kv.disk.store import DiskMiss, DiskStore
from engine.kv.request_blocks import ChainKey
from engine.kv.transfers import MoveBlock, ReadBlocks, WriteBlocks
from engine.request import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.step import BlockCopy, SampledToken, ScheduledRequest, StepPlan

VOCABULARY = 5000
ALTERNATIVES = 100  # the alternatives to the most likely token have ids below this number
NOTHING = b"nothing was written here"
INITIAL = b"the state before the first token"


def digest(*parts: bytes | int) -> bytes:
    whole = b"".join([it if isinstance(it, bytes) else it.to_bytes(8, "little", signed=True) for it in parts])
    return hashlib.blake2b(whole, digest_size=8).digest()


@lru_cache(1 << 17)
def slot(token_id: int, position: int, before: bytes = b"") -> bytes:
    """Return the content of the cache slot for a token at a position. `before` is the content of the previous slot."""
    return digest(token_id, position, before)


def slots_of(group: GroupConfig) -> int:
    """Return the number of slots in a block. A state is one slot."""
    return 1 if group.recurrent else BLOCK_SIZE


def kept(group: GroupConfig, content: bytes) -> bytes:
    """Return the part of a slot's content that fits if the group's blocks are very small. Slots that form a chain must
    fit.
    """
    return content[: group.block_bytes // slots_of(group)] if group.block_bytes else content


def next_token(variant: int, *seen: Sequence[bytes]) -> int:
    """Return the next token, given the slots that each group sees at the last token."""
    return most_likely(variant, *seen, count=1)[0][0]


def most_likely(variant: int, *seen: Sequence[bytes], count: int) -> list[tuple[int, float]]:
    """Return the `count` most likely next tokens with their log-probabilities, best first.

    The first may be any token. The others have ids below ALTERNATIVES.
    """
    root = digest(variant, *(b"".join(slots) for slots in seen))
    ranked: dict[int, float] = {}
    logprob, number, limit = 0.0, 0, VOCABULARY
    while len(ranked) < count:
        value = int.from_bytes(digest(root, number) if number else root, "little")
        if value % limit not in ranked:
            logprob -= 0.05 + 0.4 * (value >> 32) / (1 << 32)
            ranked[value % limit] = logprob
        number, limit = number + 1, ALTERNATIVES
    return list(ranked.items())


def variant_of(params: SamplingParams) -> int:
    """Return the seed of a request that samples, or 0 for a greedy one. Other seeds give other tokens."""
    return params.seed if params.top_k else 0


def expected_output(
    prompt: Sequence[int], count: int, groups: Sequence[GroupConfig] = (GroupConfig(),), variant: int = 0
) -> list[int]:
    """Return the first `count` tokens that the model generates after `prompt` if the engine is correct."""
    return list(_expected_output(tuple(prompt), count, tuple(groups), variant))


@lru_cache(1 << 12)
def _expected_output(prompt: tuple[int, ...], count: int, groups: tuple[GroupConfig, ...], variant: int) -> list[int]:
    seen = Seen(groups).after(*prompt)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token(variant, *seen.slots()))
        seen = seen.after(tokens[-1])
    return tokens


@dataclass(frozen=True)
class Seen:
    """The slots and states of all groups that the model must see after a sequence of tokens."""

    groups: Sequence[GroupConfig]
    chain: tuple[bytes, ...] = ()
    slots_by_position: tuple[bytes, ...] = ()
    state: bytes = INITIAL

    def after(self, *token_ids: int) -> "Seen":
        chain, slots_by_position, state = list(self.chain), list(self.slots_by_position), self.state
        for position, token_id in enumerate(token_ids, len(chain)):
            chain.append(slot(token_id, position, chain[-1] if chain else b""))
            slots_by_position.append(slot(token_id, position))
            state = digest(state, token_id)
        return Seen(self.groups, tuple(chain), tuple(slots_by_position), state)

    def slots(self) -> list[Sequence[bytes]]:
        """Return the visible slots of each group."""
        return [[kept(group, slot) for slot in self._slots(group)] for group in self.groups]

    def _slots(self, group: GroupConfig) -> Sequence[bytes]:
        if group.recurrent:
            return (self.state,)
        return self.slots_by_position[-group.window :] if group.window else self.chain


@dataclass(frozen=True)
class Part:
    """The tokens of one request in a step, copied so that later changes on the host do not affect them."""

    request_id: int
    token_ids: list[int]
    start: int
    tables: list[list[int]]
    samples: bool
    needs_pending_token: bool
    drafted: tuple[int, ...]
    samples_after: Sequence[int]  # numbers of drafted tokens after which a token is sampled
    # (request id, variant, number of alternatives to report) of each sampler
    samplers: tuple[tuple[int, int, int | None], ...]

    @classmethod
    def of(cls, part: ScheduledRequest) -> "Part":
        request = part.request
        token_ids, tables = request.token_ids(part.start, part.stop), [list(it) for it in part.block_tables]
        samplers = tuple((one.id, variant_of(one.params), one.params.logprobs) for one in (request, *part.followers))
        return cls(
            request.id, token_ids, part.start, tables, part.samples, part.needs_pending_token, part.drafted,
            part.draft.samples, samplers,
        )  # fmt: skip


@dataclass
class HashTicket:
    parts: list[Part]
    copies: list[BlockCopy]
    sampled: list[SampledToken] | None = None  # None until the step is executed


@dataclass
class HashRunner:
    """Executes steps in the order in which they were launched, at random times."""

    config: EngineConfig
    random: random.Random
    pools: list[list[list[bytes]]] = field(init=False)  # indexed by group and block: the slots of a block, or its state
    host: list[list[list[bytes]]] = field(init=False)
    launched: list[HashTicket] = field(default_factory=list)
    last_tokens: dict[int, int] = field(default_factory=dict)
    computed_tokens: int = 0
    failed_captures = preparations = 0  # no graphs and no kernels to compile

    def __post_init__(self) -> None:
        def pool(group: GroupConfig, blocks: int) -> list[list[bytes]]:
            return [[kept(group, NOTHING)] * slots_of(group) for _ in range(blocks)]

        groups = self.config.groups
        self.pools = [pool(group, self.config.pool_blocks(number)) for number, group in enumerate(groups)]
        self.host = [pool(*it) for it in zip(groups, self.config.host_pool_sizes, strict=False)]
        for group, blocks in zip(groups, self.pools, strict=True):
            if group.recurrent:
                blocks[NULL_BLOCK] = [INITIAL]

    def launch(self, plan: StepPlan) -> HashTicket:
        copies = [copy for part in plan.scheduled for copy in part.copies]
        ticket = HashTicket([Part.of(part) for part in plan.scheduled], copies)
        self.launched.append(ticket)
        if self.random.random() < 0.5:
            self._execute_up_to(ticket)
        return ticket

    def collect(self, ticket: HashTicket) -> list[SampledToken]:
        self._execute_up_to(ticket)
        assert ticket.sampled is not None
        return ticket.sampled

    def recover(self) -> None:
        if self.launched:
            self._execute_up_to(self.launched[-1])

    def close(self) -> None:
        self.launched.clear()

    def _execute_up_to(self, ticket: HashTicket) -> None:
        while ticket.sampled is None:
            first = self.launched.pop(0)
            for copy in first.copies:
                self.pools[copy.group][copy.target] = list(self.pools[copy.group][copy.source])
            first.sampled = [token for part in first.parts for token in self._execute(part)]

    def _execute(self, part: Part) -> list[SampledToken]:
        token_ids = [*part.token_ids, *([self.last_tokens[part.request_id]] if part.needs_pending_token else [])]
        self._compute(part, token_ids, part.start)
        if not part.samples:
            return []
        end = part.start + len(token_ids)
        sampled = [self._sample(self._seen(part, end), *sampler) for sampler in part.samplers]
        right, before = True, 0
        for number, drafted in enumerate(part.drafted, 1):
            self._compute(part, [drafted], end + number - 1)
            if number in part.samples_after:
                right = right and sampled[-1].token_id == part.drafted[before]
                before = number
                if right:
                    sampled.append(self._sample(self._seen(part, end + number), *part.samplers[0]))
        return sampled

    def _compute(self, part: Part, token_ids: Sequence[int], start: int) -> None:
        self.computed_tokens += len(token_ids)
        for position, token_id in enumerate(token_ids, start):
            for number, group in enumerate(self.config.groups):
                if group.recurrent:
                    state = self.pools[number][part.tables[number][0]]
                    state[0] = digest(state[0], token_id)
                elif group.window:
                    self._set(part, number, position, kept(group, slot(token_id, position)))
                else:
                    before = self._get(part, number, position - 1) if position else b""
                    self._set(part, number, position, slot(token_id, position, before))

    def _sample(
        self, seen: Sequence[Sequence[bytes]], request_id: int, variant: int, alternatives: int | None
    ) -> SampledToken:
        ranked = most_likely(variant, *seen, count=max(1, alternatives or 0))
        token_id, logprob = ranked[0]
        self.last_tokens[request_id] = token_id
        if alternatives is None:
            return SampledToken(request_id, token_id)
        return SampledToken(request_id, token_id, TokenLogprobs(token_id, logprob, tuple(ranked[:alternatives])))

    def _seen(self, part: Part, end: int) -> list[list[bytes]]:
        return [self._seen_by(part, number, end) for number in range(len(self.config.groups))]

    def _seen_by(self, part: Part, number: int, end: int) -> list[bytes]:
        group = self.config.groups[number]
        if group.recurrent:
            return self.pools[number][part.tables[number][0]]
        first = max(0, end - group.window) if group.window else 0
        blocks, begin = part.tables[number][first // BLOCK_SIZE : -(-end // BLOCK_SIZE)], first % BLOCK_SIZE
        slots = [it for block in blocks for it in self.pools[number][block]]
        return slots[begin : begin + end - first]

    def _get(self, part: Part, number: int, position: int) -> bytes:
        return self.pools[number][part.tables[number][position // BLOCK_SIZE]][position % BLOCK_SIZE]

    def _set(self, part: Part, number: int, position: int, value: bytes) -> None:
        self.pools[number][part.tables[number][position // BLOCK_SIZE]][position % BLOCK_SIZE] = value


SLOT_BYTES = 32  # size of a slot in a file if the group does not state the size of its blocks


def block_bytes(groups: Sequence[GroupConfig]) -> list[int]:
    """Return the number of bytes that a block of each group has in a file."""
    return [group.block_bytes or SLOT_BYTES * slots_of(group) for group in groups]


def to_bytes(slots: Sequence[bytes], size: int) -> bytes:
    """Return a block of `size` bytes. Slots that do not fill their share are followed by zeros and their length."""
    share = size // len(slots)
    return b"".join(it if len(it) == share else it.ljust(share - 1, b"\0") + bytes([len(it)]) for it in slots)


def from_bytes(content: bytes, slots: int) -> list[bytes]:
    share = len(content) // slots
    parts = [content[start : start + share] for start in range(0, len(content), share)]
    return [part if share < SLOT_BYTES else part[: part[-1]] for part in parts]


@dataclass(eq=False)
class LateHandle:
    """A transfer that is done after `checks_left` more checks."""

    work: Callable[[], int]  # runs the transfer, and returns the number of bytes that it read from or wrote to files
    checks_left: int  # number of further checks that report the transfer as unfinished
    block_transfer: "LateTransfer"
    seconds: float = 1e-3
    failed: bool = False
    num_bytes: int = 0

    @property
    def done(self) -> bool:
        self.checks_left -= 1
        if self.checks_left < 0 and self in self.block_transfer.under_way:
            self.block_transfer.finish(self)
        return self.checks_left < 0


@dataclass
class LateTransfer:
    """A block transfer that copies immediately or at the last moment, finishes late and in any order, and sometimes
    fails.
    """

    runner: HashRunner
    random: random.Random
    failing: float = 0.0
    store: DiskStore | None = None
    under_way: list[LateHandle] = field(default_factory=list)
    executed: set[int] = field(default_factory=set)
    num_moves: int = 0

    def move(self, moves: Sequence[MoveBlock]) -> LateHandle:
        self.num_moves += len(moves)
        return self._begin(lambda: self._move(moves))

    def read(self, reads: Sequence[ReadBlocks]) -> LateHandle:
        return self._begin(lambda: sum(self._read(reading) for reading in reads))

    def write(self, writing: WriteBlocks) -> LateHandle:
        return self._begin(lambda: self._write(writing))

    def touch(self, group: int, first_keys: Sequence[BlockKey]) -> None:
        if self.store is not None:
            self.store.touch(group, first_keys)

    def discard(self, group: int, block: ChainKey) -> None:
        if self.store is not None:
            self.store.discard(group, *block)

    def forget(self, keys: Collection[BlockKey], first_keys: Sequence[BlockKey]) -> None:
        if self.store is not None:
            self.store.forget(keys, first_keys)

    def wait(self, seconds: float | None = None) -> None:
        if self.under_way:
            self.random.choice(self.under_way).checks_left = 0

    def close(self) -> None:
        for ticket in tuple(self.under_way):
            self.finish(ticket)

    def finish(self, ticket: LateHandle) -> None:
        if id(ticket) not in self.executed:
            self._execute(ticket)
        self.executed.discard(id(ticket))
        self.under_way = [other for other in self.under_way if other is not ticket]

    def _begin(self, work: Callable[[], int]) -> LateHandle:
        ticket = LateHandle(work, self.random.randrange(6), self, failed=self.random.random() < self.failing)
        self.under_way.append(ticket)
        if self.random.random() < 0.5:
            self._execute(ticket)
        return ticket

    def _execute(self, ticket: LateHandle) -> None:
        self.executed.add(id(ticket))
        if not ticket.failed:
            try:
                ticket.num_bytes = ticket.work()
            except DiskMiss:
                ticket.failed = True

    def _move(self, moves: Sequence[MoveBlock]) -> int:
        for move in moves:
            pools = (self.runner.pools, self.runner.host)
            source, target = pools if move.to_host else pools[::-1]
            target[move.group][move.target] = list(source[move.group][move.source])
        return 0

    def _read(self, reading: ReadBlocks) -> int:
        assert self.store is not None

        slots = slots_of(self.runner.config.groups[reading.group])

        def into(number: int, content: memoryview) -> None:
            self.runner.pools[reading.group][reading.targets[number]] = from_bytes(bytes(content), slots)

        return self.store.read(reading.sources, into)

    def _write(self, writing: WriteBlocks) -> int:
        assert self.store is not None
        pool, size = self.runner.pools[writing.group], block_bytes(self.runner.config.groups)[writing.group]
        blocks = [(due.key, due.token_ids, memoryview(to_bytes(pool[due.block], size))) for due in writing.blocks]
        return self.store.write(writing.group, writing.first_key, blocks)


def hash_engine(
    *,
    seed: int = 0,
    num_blocks: int = 64,
    depth: int = 1,
    budget: int = 64,
    running: int = 8,
    context: int = 1 << 20,
    logit_rows: int = 0,
    groups: tuple[GroupConfig, ...] = (GroupConfig(),),
    host_blocks: int = 0,
    preemption: Preemption = Preemption.AUTO,
    failing_moves: float = 0.0,
    store: DiskStore | None = None,
    restore: Restore = Restore.ALWAYS,
    write_delay: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    drafts: bool = False,
) -> tuple[Engine[HashTicket], HashRunner]:
    """Return an engine with the hash model as its backend."""
    config = EngineConfig(
        "hash",
        context,
        num_blocks,
        max_step_tokens=budget,
        max_running=running,
        max_logit_rows=logit_rows,
        step_depth=depth,
        groups=groups,
        host_blocks=host_blocks,
        preemption=preemption,
        restore=restore,
        write_delay=write_delay,
        drafts=drafts,
    )
    runner = HashRunner(config, random.Random(seed))
    block_transfer = LateTransfer(runner, random.Random(seed + 1), failing_moves, store)
    return Engine(config, VOCABULARY, runner, block_transfer, store, clock), runner
