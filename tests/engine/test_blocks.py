import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import NULL_BLOCK, BlockPool


def test_hands_out_every_block_but_the_null_block() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="0 free"):
        pool.allocate(1)


@pytest.mark.parametrize("block", [NULL_BLOCK, -1, 5, 3])
def test_refuses_to_release_what_is_not_held(block: int) -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    with pytest.raises(ValueError, match="not held"):
        pool.release([block])


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool._references[1] = 0
    with pytest.raises(RuntimeError, match="neither"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random allocations and releases against a plain list of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            self.held.append(self.pool.allocate(count))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        self.pool.release(self.held.pop(which % len(self.held)))

    @invariant()
    def consistent(self) -> None:
        self.pool.check()
        blocks = [block for table in self.held for block in table]
        assert len(blocks) == len(set(blocks)) == 8 - self.pool.num_free


TestPoolMachine = PoolMachine.TestCase
