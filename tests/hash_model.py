"""The hash model: an engine backend whose next token is a digest of everything it attends to.

A slot of its cache holds a digest of a token, its position and the slot before it; the next token is a digest of all
its slots, read through the block table. So one wrong, stale, missing or misplaced block changes the output, and
what the output must be is known without running anything: it is a function of the prompt alone.

Steps are executed late: some at once, some only when they are collected, as a device would.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.config import BLOCK_SIZE, EngineConfig
from engine.core import Engine
from engine.request import SampledToken, ScheduledRequest, StepPlan

VOCABULARY = 5000
NOTHING = b"nothing was written here"


def digest(*parts: bytes | int) -> bytes:
    out = hashlib.blake2b(digest_size=8)
    for part in parts:
        out.update(part if isinstance(part, bytes) else part.to_bytes(8, "little", signed=True))
    return out.digest()


def next_token(slots: Sequence[bytes]) -> int:
    return int.from_bytes(digest(b"".join(slots)), "little") % VOCABULARY


def expected_output(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens that the model must generate after `prompt`."""
    slots: list[bytes] = []
    tokens = list(prompt)
    for position in range(len(prompt) + count):
        if position == len(tokens):
            tokens.append(next_token(slots))
        slots.append(digest(tokens[position], position, slots[-1] if slots else b""))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Part:
    """What a device is given of one request: copies, so that later changes on the host cannot reach it."""

    request_id: int
    token_ids: list[int]
    start: int
    table: list[int]
    samples: bool
    feeds: bool

    @classmethod
    def of(cls, part: ScheduledRequest) -> "Part":
        request = part.request
        token_ids = request.token_ids(part.start, part.stop)
        return cls(request.id, token_ids, part.start, list(request.block_table), part.samples, part.feeds)


@dataclass
class HashTicket:
    parts: list[Part]
    sampled: list[SampledToken] | None = None  # None: not executed yet


@dataclass
class HashRunner:
    """Executes steps in the order they were launched, at a time of the generator's choosing."""

    num_blocks: int
    random: random.Random
    slots: list[bytes] = field(init=False)
    launched: list[HashTicket] = field(default_factory=list)
    last_tokens: dict[int, int] = field(default_factory=dict)
    computed_tokens: int = 0

    def __post_init__(self) -> None:
        self.slots = [NOTHING] * (self.num_blocks * BLOCK_SIZE)

    def launch(self, plan: StepPlan) -> HashTicket:
        ticket = HashTicket([Part.of(part) for part in plan.scheduled])
        self.launched.append(ticket)
        if self.random.random() < 0.5:
            self._execute_up_to(ticket)
        return ticket

    def collect(self, ticket: HashTicket) -> list[SampledToken]:
        self._execute_up_to(ticket)
        assert ticket.sampled is not None
        return ticket.sampled

    def _execute_up_to(self, ticket: HashTicket) -> None:
        while ticket.sampled is None:
            first = self.launched.pop(0)
            first.sampled = [token for part in first.parts for token in self._execute(part)]

    def _execute(self, part: Part) -> list[SampledToken]:
        token_ids = [*part.token_ids, *([self.last_tokens[part.request_id]] if part.feeds else [])]
        self.computed_tokens += len(token_ids)
        for position, token_id in enumerate(token_ids, part.start):
            before = self.slots[self._slot(part, position - 1)] if position else b""
            self.slots[self._slot(part, position)] = digest(token_id, position, before)
        if not part.samples:
            return []
        attended = [self.slots[self._slot(part, p)] for p in range(part.start + len(token_ids))]
        self.last_tokens[part.request_id] = next_token(attended)
        return [SampledToken(part.request_id, self.last_tokens[part.request_id])]

    def _slot(self, part: Part, position: int) -> int:
        return part.table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def hash_engine(
    *,
    seed: int = 0,
    num_blocks: int = 64,
    depth: int = 1,
    budget: int = 64,
    running: int = 8,
    context: int = 1 << 20,
) -> tuple[Engine[HashTicket], HashRunner]:
    """A real engine over the hash model."""
    config = EngineConfig("hash", context, num_blocks, max_step_tokens=budget, max_running=running, step_depth=depth)
    runner = HashRunner(num_blocks, random.Random(seed))
    return Engine(config, VOCABULARY, runner), runner
