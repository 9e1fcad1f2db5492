"""ThreadedTransfer: the conditions under which `wait` returns."""

import threading

from engine.kv.cache import KVCache
from engine.kv.threaded_transfer import ThreadedTransfer
from engine.kv.transfers import MoveBlock
from tests.support.kv_groups import kv_group
from tests.support.processes import HANGING_SECONDS


class HeldCache(KVCache):
    """A cache whose copies between the pools block until the test releases them."""

    def __init__(self) -> None:
        super().__init__([kv_group((0,), 1, 8)], [4], [4])
        self.may_end = {1: threading.Event(), 2: threading.Event()}

    def move(self, moves: object) -> None:
        assert isinstance(moves, list)
        assert self.may_end[moves[0].source].wait(HANGING_SECONDS)
        super().move(moves)


def test_wait_returns_only_for_transfers_that_were_not_seen_done() -> None:
    kv = HeldCache()
    block_transfer = ThreadedTransfer(kv)
    first, second = (block_transfer.move([MoveBlock(0, block, block, to_host=True)]) for block in (1, 2))
    assert not first.done
    kv.may_end[1].set()
    block_transfer.wait()
    block_transfer.wait()  # returns at once, because no `done` has reported the end of the first transfer
    assert first.done
    assert not second.done
    woken = threading.Event()
    waiter = threading.Thread(target=lambda: (block_transfer.wait(), woken.set()))
    waiter.start()
    assert not woken.wait(0.2)  # `first.done` was true, so the second transfer is awaited
    kv.may_end[2].set()
    waiter.join(HANGING_SECONDS)
    assert woken.is_set()
    assert second.done
    assert not second.failed
    block_transfer.wait()  # returns at once, because no transfer is under way
