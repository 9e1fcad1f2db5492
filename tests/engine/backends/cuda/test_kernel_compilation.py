"""Compilation of kernels in other processes, before they are launched."""

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from triton import knobs

from engine.backends.cuda import device
from engine.backends.cuda.kernel_compilation import FirstLaunches, compile_kernels
from engine.errors import LoadStopped
from engine.load_options import LoadControl, LoadOptions
from engine.loading import compile_gpu_kernels, open_checkpoint
from tests.engine.backends.cuda.fake_variant import FakeVariant
from tests.engine.backends.cuda.two_devices import INTERPRETED
from tests.engine.models.tiny_llama import make

ROOT = Path(__file__).parents[4]


@pytest.fixture
def compiled() -> Callable[..., list[tuple[int, int]]]:
    def run(*variants: Any) -> list[tuple[int, int]]:
        reports: list[tuple[int, int]] = []
        compile_kernels(variants, lambda done, total: reports.append((done, total)))
        return reports

    return run


def test_missing_kernels_are_compiled_in_other_processes(
    tmp_path: Path, compiled: Callable[..., list[tuple[int, int]]], caplog: pytest.LogCaptureFixture
) -> None:
    variants = [FakeVariant(tmp_path / f"{number}", fails=number == 2) for number in range(6)]
    variants[0].path.write_text("known")
    with caplog.at_level(logging.WARNING):
        reports = compiled(*variants)
    assert reports == sorted(set(reports))  # kernels that end at the same time are reported once
    assert (reports[0], reports[-1]) == ((0, 5), (5, 5))
    assert "the kernel 2 could not be compiled in advance: out of registers" in caplog.text
    assert variants[0].path.read_text() == "known"
    compilers = {variant.path.read_text() for variant in variants[1:] if not variant.fails}
    assert str(os.getpid()) not in compilers
    assert compiled(*variants) == []


def test_stop_ends_the_compilation_and_its_processes(tmp_path: Path) -> None:
    stop, reports = threading.Event(), list[tuple[int, int]]()
    variants: list[Any] = [FakeVariant(tmp_path / f"{number}", seconds=60) for number in range(4)]
    before = set(multiprocessing.active_children())

    def report(done: int, total: int) -> None:
        reports.append((done, total))
        stop.set()

    with pytest.raises(LoadStopped):
        compile_kernels(variants, report, LoadControl(stop.is_set).check)
    assert reports == [(0, 4)]
    assert set(multiprocessing.active_children()) <= before


def test_single_missing_kernels_start_no_process(
    tmp_path: Path, compiled: Callable[..., list[tuple[int, int]]]
) -> None:
    variants = [FakeVariant(tmp_path / f"{number}") for number in range(3)]
    assert compiled(*variants) == []
    assert not any(variant.is_cached() for variant in variants)


def test_first_launches_are_counted() -> None:
    with knobs.runtime.scope():
        first = FirstLaunches()
        first.watch()
        knobs.runtime.jit_post_compile_hook(key="", repr="", fn=None, compile={}, is_manual_warmup=False)
    assert first.count == 1


def test_kernels_are_compiled_without_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, int]] = []
    reports: list[tuple[int, int]] = []
    variants = [FakeVariant(tmp_path / "kernel")]
    monkeypatch.setattr(device, "recording_kernels", lambda: nullcontext(variants))
    monkeypatch.setattr(
        device, "launch_every_kernel", lambda step, limits, model: launched.append((limits.requests, model.vocab_size))
    )
    monkeypatch.setattr(device, "compile_kernels", lambda given, report, check: report(len(given), len(variants)))
    options = LoadOptions(card=INTERPRETED, report_kernels=lambda done, total: reports.append((done, total)))
    with open_checkpoint(make(tmp_path, layers=1).path) as checkpoint:
        compile_gpu_kernels(checkpoint, options)
        compile_gpu_kernels(checkpoint, LoadOptions(device="cpu"))
    assert launched == [(device.MAX_RUNNING, 97)]
    assert reports == [(1, 1)]


def test_failing_compilation_does_not_end_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("A process in the process pool was terminated abruptly")

    monkeypatch.setattr(device, "recording_kernels", lambda: nullcontext([]))
    monkeypatch.setattr(device, "launch_every_kernel", fail)
    with open_checkpoint(make(tmp_path, layers=1).path) as checkpoint:
        compile_gpu_kernels(checkpoint, LoadOptions(card=INTERPRETED))
    assert "kernels are compiled when they are needed: A process in the process pool" in caplog.text


@pytest.mark.slow
def test_no_kernel_is_left_to_compile_after_compilation_in_advance(tmp_path: Path) -> None:
    removed = ("TRITON_INTERPRET", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    command = [sys.executable, "-m", "tests.engine.backends.cuda.compiled_in_advance"]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
