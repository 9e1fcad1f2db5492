"""The report of the NVIDIA driver, on Linux and in WSL 2."""

from pathlib import Path

import pytest

from engine.backends.cuda import driver
from engine.backends.cuda.driver import driver_version, free_memories, too_old_for


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a driver. Its files may be put into this folder."""
    monkeypatch.setattr(driver, "MODULE", tmp_path / "version")
    monkeypatch.setattr(driver, "WSL_LIBRARY", tmp_path / "wsl" / "libcuda.so.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    driver._nvidia_smi.cache_clear()
    return tmp_path


def write_nvidia_smi(path: Path, query: str, reply: str, status: int = 0) -> None:
    path.write_text(f'#!/bin/sh\n[ "$1" = --query-gpu={query} ] && printf "{reply}"; exit {status}\n')
    path.chmod(0o755)


def test_machine_without_a_driver_has_no_version(folder: Path) -> None:
    assert driver_version() is None
    assert free_memories() == {}


def test_version_is_that_of_the_kernel_module(folder: Path) -> None:
    (folder / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 2024\n")
    assert driver_version() == "550.54.14"
    (folder / "version").write_text("unknown")
    assert driver_version() == ""


def test_wsl_has_a_driver_without_a_kernel_module(folder: Path) -> None:
    (folder / "wsl").mkdir()
    (folder / "wsl" / "libcuda.so.1").touch()
    assert driver_version() == ""
    driver._nvidia_smi.cache_clear()
    write_nvidia_smi(folder / "wsl" / "nvidia-smi", "driver_version", "566.36\\n")
    assert driver_version() == "566.36"


@pytest.mark.parametrize(
    ("reply", "status", "expected"),
    [
        ("GPU-a1-b2, 10\\nGPU-c3, 24000\\n", 0, {"a1-b2": 10 << 20, "c3": 24000 << 20}),
        ("GPU-a1, [N/A]\\nodd\\n", 0, {}),
        ("GPU-a1, 10\\n", 9, {}),
    ],
)
def test_free_memory_of_each_gpu_is_read_from_nvidia_smi(
    folder: Path, reply: str, status: int, expected: dict[str, int]
) -> None:
    write_nvidia_smi(folder / "nvidia-smi", "uuid,memory.free", reply, status)
    assert free_memories() == expected


@pytest.mark.parametrize(
    ("cuda", "version", "least"),
    [("13.0", "550.54.14", 580), ("13.0", "580.65", 0), ("12.8", "470.82", 525), ("13.0", "", 0), (None, "470", 0)],
)
def test_driver_below_the_required_version_is_reported(cuda: str | None, version: str | None, least: int) -> None:
    assert too_old_for(cuda, version) == least
