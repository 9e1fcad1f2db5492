"""Random sequences of events: after each one, the reference counts of all blocks match their holders.

The full run is `pytest tests/engine/kv/test_kv_machine.py --rules 1000000`.
"""

import contextlib
import tempfile
from collections import Counter
from pathlib import Path
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.config import BLOCK_SIZE, GroupConfig, Preemption
from engine.core import Engine
from engine.errors import PromptTooLong
from engine.kv.blocks import NULL_BLOCK
from engine.kv.disk.quota import Quota
from engine.kv.disk.store import DiskStore
from engine.request import Origin, RequestStatus, ServiceClass
from engine.sampling_params import BeamParams
from tests.engine.hash_run import Run
from tests.support.hash_model import HashTicket, block_bytes, hash_engine

GROUPS = {
    "full": (GroupConfig(),),
    "windows": (GroupConfig(), GroupConfig(window=20)),
    "hybrid": (GroupConfig(), GroupConfig(recurrent=True)),
}
LETTERS = [tuple(range(100 * n, 100 * n + BLOCK_SIZE)) for n in range(3)]


def expected_references(engine: Engine[HashTicket]) -> list[Counter[int]]:
    """Return the number of references that each block of each pool should have: by requests, copies, and steps under
    way.
    """
    scheduler = engine._scheduler
    memory = scheduler._memory
    groups = len(memory.groups)
    held: list[Counter[int]] = [Counter() for _ in memory.pools]
    requests = scheduler._requests
    for request in (*requests.running.values(), *requests.ending.values(), *requests.waiting):
        blocks_of = memory.blocks_of(request)
        for number, table in enumerate(blocks_of.tables):
            held[number].update(block for block in table if block != NULL_BLOCK)
        for number, blocks in enumerate(blocks_of.saved.blocks if blocks_of.saved else ()):
            held[groups + number].update(block for _, block in blocks)
    for transfer in memory.transfers._under_way:
        for pool, block in transfer.held:
            held[memory.pools.index(pool)][block] += 1
    for step in engine._under_way:
        for copy in (copy for part in step.plan.scheduled for copy in part.copies):
            if copy.source != NULL_BLOCK:
                held[copy.group][copy.source] += 1
    return held


class EngineMachine(RuleBasedStateMachine):
    """Requests and searches that start, fork, step, end, and are preempted, in pools that are too small."""

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)), depth=st.integers(1, 2), preemption=st.sampled_from(Preemption),
        seed=st.integers(0, 1000), host_blocks=st.sampled_from([0, 5, 12]), files=st.booleans(),
    )  # fmt: skip
    def start(
        self, groups: str, depth: int, preemption: Preemption, seed: int, host_blocks: int, files: bool,
    ) -> None:  # fmt: skip
        self.folder = tempfile.TemporaryDirectory() if files else None

        def new_engine() -> Engine[HashTicket]:
            engine, _ = hash_engine(
                seed=seed, num_blocks=10, depth=depth, budget=24, running=4, groups=GROUPS[groups], failing_moves=0.1,
                host_blocks=host_blocks, preemption=preemption, store=self._new_store(GROUPS[groups]),
            )  # fmt: skip
            return engine

        self.new_engine = new_engine
        self.engine = new_engine()
        self.run = Run(self.engine)

    def _new_store(self, groups: tuple[GroupConfig, ...]) -> DiskStore | None:
        if self.folder is None:
            return None
        root = Path(self.folder.name)
        return DiskStore(root / "model", bytes(32), block_bytes(groups), Quota(root, 1 << 20))

    @precondition(lambda self: self.folder)
    @rule()
    def restart(self) -> None:
        """Start a new engine without stopping the old one, whose pending writes may be done or not."""
        self.engine = self.new_engine()
        self.run = Run(self.engine)

    @precondition(lambda self: self.folder)
    @rule(which=st.integers(0, 1000))
    def lose_a_file(self, which: int) -> None:
        assert self.folder is not None
        paths = sorted(Path(self.folder.name).rglob("*.run"))
        if paths:
            paths[which % len(paths)].unlink()

    @rule(letters=st.lists(st.sampled_from(LETTERS), min_size=1, max_size=3), kept=st.integers(0, 40))
    def forget(self, letters: list[tuple[int, ...]], kept: int) -> None:
        self.engine.forget([token_id for letter in letters for token_id in letter], kept=kept)

    @rule(
        letters=st.lists(st.sampled_from(LETTERS), max_size=3), rest=st.integers(1, 18), count=st.integers(1, 4),
        tokens=st.integers(1, 40), service=st.sampled_from(ServiceClass), stored=st.booleans(),
    )  # fmt: skip
    def submit(
        self, letters: list[tuple[int, ...]], rest: int, count: int, tokens: int, service: ServiceClass, stored: bool,
    ) -> None:  # fmt: skip
        if self.engine.num_waiting < 6:
            prompt = (*(token_id for letter in letters for token_id in letter), *range(900, 900 + rest))
            self.run.submit(prompt, Origin(service, stored=stored), count, max_tokens=tokens)

    @rule(
        letters=st.lists(st.sampled_from(LETTERS), max_size=2), rest=st.integers(1, 18), width=st.integers(1, 4),
        results=st.integers(1, 4), stopping=st.sampled_from((True, False, "never")), tokens=st.integers(1, 20),
        service=st.sampled_from(ServiceClass),
    )  # fmt: skip
    def search(
        self, letters: list[tuple[int, ...]], rest: int, width: int, results: int,
        stopping: Literal[True, False, "never"], tokens: int, service: ServiceClass,
    ) -> None:  # fmt: skip
        if self.engine.num_waiting < 6:
            prompt = (*(token_id for letter in letters for token_id in letter), *range(900, 900 + rest))
            beams = BeamParams(width, min(width, results), early_stopping=stopping)
            with contextlib.suppress(PromptTooLong):
                self.run.search(prompt, beams, Origin(service), max_tokens=tokens)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self.run.step()

    @precondition(lambda self: self.run.requests)
    @rule(which=st.integers(0, 1000))
    def end(self, which: int) -> None:
        living = [number for number in self.run.requests if number not in self.run.finished]
        if living:
            self.run.abort(living[which % len(living)])

    @rule(which=st.integers(0, 3))
    def preempt(self, which: int) -> None:
        scheduler = self.engine._scheduler
        running = [it for it in scheduler._requests.running.values() if it.status is RequestStatus.RUNNING]
        if running and running[which % len(running)].num_preemptions < 6:
            victim = running[which % len(running)]
            scheduler._preemption.preempt(victim, victim)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        memory = self.engine._scheduler._memory
        memory.check_pools()
        for pool, expected in zip(memory.pools, expected_references(self.engine), strict=True):
            assert [expected[block] for block in range(pool.num_blocks)] == pool._references

    def teardown(self) -> None:
        self.run.run_out()
        self.run.check()
        if self.folder is not None:
            self.folder.cleanup()


def test_random_events_lose_no_block_and_no_token(rules: int) -> None:
    steps = 50
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(max_examples=max(1, rules // steps), stateful_step_count=steps, deadline=None),
    )
