from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.config import BLOCK_SIZE
from engine.kv.blocks import NULL_BLOCK, BlockKey, BlockPool, block_key, root_key


def test_every_block_except_the_null_block_is_allocated() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="0 free"):
        pool.allocate(1)


@pytest.mark.parametrize("block", [NULL_BLOCK, -1, 5, 3])
def test_releasing_a_block_that_is_not_held_raises(block: int) -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    with pytest.raises(ValueError, match="not held"):
        pool.release([block])


def test_consistency_check_finds_a_lost_block() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool._references[1] = 0
    with pytest.raises(RuntimeError, match="neither"):
        pool.check_consistency()


ROOT = root_key("model")
A, B, C = (tuple(range(n, n + BLOCK_SIZE)) for n in (0, 100, 200))


def filled(pool: BlockPool, *contents: tuple[int, ...]) -> list[int]:
    """Return a held chain of published blocks."""
    blocks, key = pool.allocate(len(contents)), ROOT
    for block, content in zip(blocks, contents, strict=True):
        key = block_key(key, content)
        pool.publish(block, key, content)
    return blocks


def find(pool: BlockPool, letters: Sequence[tuple[int, ...]], root: BlockKey = ROOT) -> list[int]:
    """Return the longest cached prefix, and hold it."""
    blocks, key = [], root
    for content in letters:
        key = block_key(key, content)
        block = pool.find(key, content)
        if block == NULL_BLOCK:
            break
        pool.hold(block)
        blocks.append(block)
    return blocks


def test_longest_cached_prefix_is_found() -> None:
    pool = BlockPool(10)
    chain = filled(pool, A, B)
    pool.release(chain)
    assert pool.num_free == 9
    assert pool.num_cached == 2
    assert find(pool, [A, B, C]) == chain
    assert (pool.num_free, pool.num_cached) == (7, 0)
    assert find(pool, [A, C]) == chain[:1]
    assert find(pool, [B, A]) == []
    assert find(pool, [A, B], root_key("another model")) == []


def test_unpublished_block_is_not_found() -> None:
    pool = BlockPool(10)
    pool.allocate(1)
    assert find(pool, [A]) == []


def test_key_with_other_tokens_is_a_miss() -> None:
    pool = BlockPool(10)
    (block,) = pool.allocate(1)
    pool.publish(block, block_key(ROOT, A), B)
    assert find(pool, [A]) == []


def test_eviction_takes_the_oldest_chain_from_its_end() -> None:
    pool = BlockPool(6)
    old, recent = filled(pool, A, B), filled(pool, C)
    pool.release(old)
    pool.release(recent)
    assert pool.allocate(2) == [4, 5]  # blocks that were never used before
    pool.allocate(1)
    assert len(find(pool, [A, B])) == 1
    pool.check_consistency()


def test_blocks_released_cold_are_evicted_first() -> None:
    pool = BlockPool(4)
    first, second = filled(pool, A), filled(pool, B)
    pool.release(first)
    pool.release(second, cold=True)
    assert list(pool.in_eviction_order()) == [*second, *first]
    assert [pool.content(block)[1] for block in pool.in_eviction_order()] == [B, A]
    assert pool.allocate(2) == [3, *second]


def test_holding_a_free_empty_block_raises() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.hold(block)
    assert pool.is_shared(block)
    assert not pool.is_findable(block)
    pool.release([block, block])
    with pytest.raises(ValueError, match="neither held nor findable"):
        pool.hold(block)
    with pytest.raises(ValueError, match="not findable"):
        pool.content(block)


def test_first_published_block_of_a_key_is_kept() -> None:
    pool = BlockPool(6)
    first, second = filled(pool, A), filled(pool, A)
    pool.release(second)
    assert find(pool, [A]) == first
    pool.check_consistency()


@pytest.mark.parametrize("content", [(), A[:-1], (*A, 1)])
def test_only_full_blocks_are_published(content: tuple[int, ...]) -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="not full"):
        pool.publish(block, ROOT, content)


def test_publishing_a_free_block_raises() -> None:
    with pytest.raises(ValueError, match="not held"):
        BlockPool(3).publish(1, ROOT, A)


def test_root_key_depends_on_where_a_salt_is_divided() -> None:
    assert root_key("ab", "c") != root_key("a", "bc") != root_key("abc")


class PoolMachine(RuleBasedStateMachine):
    """Requests that match prefixes, allocate, publish, share, and release blocks, compared with a model of the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.chains: list[tuple[list[int], list[tuple[int, ...]], int]] = []  # blocks, contents, number published
        # block -> contents of the chain up to and including it
        self.contents: dict[int, tuple[tuple[int, ...], ...]] = {}

    @rule(letters=st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=5))
    def join(self, letters: list[tuple[int, ...]]) -> None:
        found = find(self.pool, letters)
        for depth, block in enumerate(found):
            assert self.contents[block] == tuple(letters[: depth + 1])
        if len(letters) - len(found) > self.pool.num_free:
            self.pool.release(found)
            return
        fresh = self.pool.allocate(len(letters) - len(found))
        for depth, block in enumerate(fresh, len(found)):
            self.contents[block] = tuple(letters[: depth + 1])
        self.chains.append(([*found, *fresh], letters, len(found)))

    @precondition(lambda self: self.chains)
    @rule(which=st.integers(0, 100), count=st.integers(1, 3))
    def publish(self, which: int, count: int) -> None:
        index = which % len(self.chains)
        blocks, letters, published = self.chains[index]
        key = ROOT
        for depth, content in enumerate(letters[: published + count]):
            key = block_key(key, content)
            if depth >= published:
                self.pool.publish(blocks[depth], key, content)
        self.chains[index] = (blocks, letters, min(len(letters), published + count))

    @precondition(lambda self: self.chains)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        self.pool.release(self.chains.pop(which % len(self.chains))[0])

    @invariant()
    def consistent(self) -> None:
        self.pool.check_consistency()
        held = {block for blocks, _, _ in self.chains for block in blocks}
        assert len(held) == self.pool.num_usable - self.pool.num_free


def test_random_rules_keep_the_pool_consistent(rules: int) -> None:
    """The full run is `pytest tests/engine/kv/test_blocks.py --rules 100000`."""
    steps = 50
    run_state_machine_as_test(
        PoolMachine, settings=settings(max_examples=rules // steps, stateful_step_count=steps, deadline=None)
    )
