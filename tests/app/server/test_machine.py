"""The report of disk and GPU memory. The cache folder is scanned at most once every few seconds."""

from pathlib import Path

import pytest

from app.models.decode_rate import decode_rate
from app.server import machine as module
from app.server.machine import AmountReport, GpuMemory, Machine
from engine.kv.disk.segment_file import SUFFIX
from tests.app.server.live_server import Clock


def test_files_are_scanned_every_few_seconds(tmp_path: Path) -> None:
    clock = Clock()
    machine = Machine(tmp_path, 1_000_000, clock=clock)
    assert machine.disk() == AmountReport(0, 1_000_000)
    bucket = tmp_path / ("0a" * 16) / "3f"
    bucket.mkdir(parents=True)
    for number, size in enumerate((700, 41)):
        (bucket / f"3f-{number}{SUFFIX}").write_bytes(bytes(size))
    (bucket / "note.txt").write_bytes(bytes(9))
    assert machine.disk() == AmountReport(0, 1_000_000)
    clock.seconds += 6
    assert machine.disk() == AmountReport(741, 1_000_000)


def test_automatic_limit_depends_on_the_free_space(tmp_path: Path) -> None:
    disk = Machine(tmp_path / "not there yet").disk()
    assert disk is not None
    assert disk.used == 0
    assert disk.total > 0


def test_gpu_report_includes_memory_of_other_programs() -> None:
    assert Machine(gpu=GpuMemory(24_000, lambda: 5_500, lambda: 9_000)).gpu() == AmountReport(18_500, 24_000)
    assert Machine(gpu=GpuMemory(24_000, lambda: 24_100, lambda: 0)).gpu() == AmountReport(0, 24_000)


def test_available_memory_is_free_memory_plus_memory_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine(gpu=GpuMemory(24_000, lambda: 5_500, lambda: 9_000)).room() == 14_500
    monkeypatch.setattr(module, "resident_bytes", lambda: 3_000)
    monkeypatch.setattr(module, "memory_without_gpu", lambda: 8_000)
    assert Machine().room() == 11_000
    # None: the machine has a GPU, but this model does not use it
    monkeypatch.setattr(module, "memory_without_gpu", lambda: None)
    assert Machine().room() == 0


def test_report_without_files_and_gpu_is_empty() -> None:
    assert (Machine().disk(), Machine().gpu()) == (None, None)


def test_decode_rate_is_zero_until_a_step_is_measured() -> None:
    assert (decode_rate(2_000_000_000, 0.0), decode_rate(2_000_000_000, 0.5)) == (0.0, 4_000_000_000.0)


def test_small_weights_measure_no_decode_rate() -> None:
    assert decode_rate(98_000_000, 0.03) == 0.0
