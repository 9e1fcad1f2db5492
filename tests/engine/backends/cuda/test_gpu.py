"""One GPU, driven through torch: capture streams, and events that threads wait for."""

from typing import Any

import pytest

from engine.backends.cuda.gpu import Gpu
from quant.kernels.card import Card
from tests.engine.backends.cuda.fake_cuda import FakeCuda

CARD = Card("a card", (9, 0), 132, 232448, 50 << 20, 80 << 30)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_all_graphs_are_captured_on_one_stream_that_no_copy_uses(cuda: FakeCuda) -> None:
    gpu = Gpu(CARD)
    capture, copies = gpu.capture_stream(), [gpu.copy_stream() for _ in range(3)]
    ran_on: list[Any] = []
    for _ in range(40):
        capture.capture(lambda: ran_on.append(cuda.current[-1]))()
    assert len(copies) == 3
    assert cuda.streams == [(0, -1), (0, 0), (0, 0), (0, 0)]
    assert len(ran_on) == 80  # a warm-up run before each capture
    assert len(set(map(id, ran_on))) == 1
    assert set(cuda.pools) == {1}
    assert cuda.calls.count("replay") == 40


def test_graphs_after_a_reset_use_a_new_pool(cuda: FakeCuda) -> None:
    capture = Gpu(CARD).capture_stream()
    capture.capture(lambda: None)
    capture.reset()
    capture.capture(lambda: None)
    assert cuda.pools == [1, 2]


@pytest.mark.parametrize("where", ["capture_begin", "capture_end"])
def test_capture_that_cannot_start_or_end_detaches_the_allocator(where: str, cuda: FakeCuda) -> None:
    capture = Gpu(CARD).capture_stream()
    cuda.broken.append(where)
    with pytest.raises(RuntimeError, match=f"injected into {where}"):
        capture.capture(lambda: None)
    assert cuda.calls[-4:] == [where, "_cuda_endAllocateToPool", "_cuda_releasePool", "wait_stream"]


def test_failed_work_ends_its_capture(cuda: FakeCuda) -> None:
    capture = Gpu(CARD).capture_stream()
    runs = iter((None, RuntimeError("no memory")))

    def fail_in_the_capture() -> None:
        if (error := next(runs)) is not None:
            raise error

    with pytest.raises(RuntimeError, match="no memory"):
        capture.capture(fail_in_the_capture)
    assert cuda.calls == ["wait_stream", "capture_begin", "capture_end", "wait_stream"]


def test_waiting_for_a_step_does_not_spin(cuda: FakeCuda) -> None:
    Gpu(CARD).record_event().wait()
    assert cuda.calls == ["record", "wait"]
