"""The memory of the machine, and the limits of control groups in files such as those of Linux."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engine import system_memory
from engine.system_memory import available_memory, group_memories, total_memory

GIB = 1 << 30
ROOT = Path(__file__).parents[2]


def group(folder: Path, **files: str) -> None:
    """Write the files of one control group."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


@pytest.fixture
def process(tmp_path: Path) -> Path:
    folder = tmp_path / "self"
    folder.mkdir()
    return folder


def found(process: Path) -> list[tuple[int, int]]:
    groups = group_memories(process, process.parent / "cgroup")
    return [(it.limit, it.available) for it in groups]


def test_group_and_those_that_hold_it_are_read(tmp_path: Path, process: Path) -> None:
    (process / "cgroup").write_text("0::/user.slice/shell.scope\n")
    root = tmp_path / "cgroup"
    stat = "anon 5\nactive_file 100\ninactive_file 200\n"
    group(root / "user.slice", memory__max=f"{4 * GIB}\n", memory__current=f"{3 * GIB}\n")
    group(root / "user.slice/shell.scope", memory__max=f"{2 * GIB}\n", memory__current=f"{GIB}\n", memory__stat=stat)
    assert found(process) == [(2 * GIB, GIB + 300), (4 * GIB, GIB)]


def test_group_that_slows_down_before_its_limit_is_limited_earlier(tmp_path: Path, process: Path) -> None:
    (process / "cgroup").write_text("0::/\n")
    group(tmp_path / "cgroup", memory__max="max\n", memory__high=f"{GIB}\n", memory__current="0\n")
    assert found(process) == [(GIB, GIB)]


def test_groups_without_a_limit_are_skipped(tmp_path: Path, process: Path) -> None:
    (process / "cgroup").write_text("0::/a\n")
    group(tmp_path / "cgroup/a", memory__max="max\n", memory__high="max\n", memory__current="77\n")
    assert found(process) == []


def test_group_over_its_limit_has_no_memory_left(tmp_path: Path, process: Path) -> None:
    (process / "cgroup").write_text("0::/a\n")
    group(tmp_path / "cgroup/a", memory__max="100\n", memory__current="150\n", memory__stat="active_file 10\n")
    assert found(process) == [(100, 0)]


def test_first_version_has_a_folder_for_each_controller(tmp_path: Path, process: Path) -> None:
    """In a container, the path can be that on the host, which is not mounted."""
    (process / "cgroup").write_text("5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/\n")
    stat = "active_file 9\ntotal_active_file 100\ntotal_inactive_file 200\n"
    group(
        tmp_path / "cgroup/memory",
        memory__limit_in_bytes=f"{GIB}\n",
        memory__usage_in_bytes="1000\n",
        memory__stat=stat,
    )
    assert found(process) == [(GIB, GIB - 700)]


@pytest.mark.parametrize("content", ["", "nothing", "0:\n", "4:cpu:/a\n"])
def test_unreadable_groups_are_ignored(process: Path, content: str) -> None:
    (process / "cgroup").write_text(content)
    assert found(process) == []
    assert found(process / "absent") == []


def test_lower_of_machine_and_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = psutil.virtual_memory()._replace(total=8 * GIB, available=6 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    groups: list[system_memory.GroupMemory] = []
    monkeypatch.setattr(system_memory, "group_memories", lambda: iter(groups))
    assert (total_memory(), available_memory()) == (8 * GIB, 6 * GIB)
    groups.append(system_memory.GroupMemory(16 * GIB, 11 * GIB))
    assert (total_memory(), available_memory()) == (8 * GIB, 5 * GIB)
    groups.append(system_memory.GroupMemory(2 * GIB, GIB))
    assert (total_memory(), available_memory()) == (2 * GIB, GIB)


ALLOCATION = """
from engine.system_memory import resident_bytes

before = resident_bytes()
content = b"1" * (256 << 20)
print(before is None or resident_bytes() - before > 250 << 20)
"""


def test_allocated_bytes_are_resident() -> None:
    """The process is a new one, because threads of this one may free memory meanwhile."""
    done = subprocess.run([sys.executable, "-c", ALLOCATION], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_available_memory_is_a_part_of_the_total() -> None:
    assert 0 < available_memory() <= total_memory()
