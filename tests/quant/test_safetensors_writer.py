import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from quant import safetensors_writer
from quant.safetensors import SAFETENSORS_TYPES, SafetensorsFile
from quant.safetensors_shards import SafetensorsShards
from quant.safetensors_writer import Entry, SafetensorsWriter
from tests.quant.safetensors_bytes import read_by_the_package

WHOLE_BYTES = sorted(name for name, kind in SAFETENSORS_TYPES.items() if kind.bits % 8 == 0)


def entry(name: str, kind: str, *shape: int, seed: int = 0) -> Entry:
    count = SAFETENSORS_TYPES[kind].bits // 8
    for size in shape:
        count *= size
    return Entry(name, kind, shape, random.Random(f"{name} {seed}").randbytes(count))


def write(folder: Path, entries: Iterable[Entry], shard_bytes: int = 1 << 30) -> list[Path]:
    with SafetensorsWriter(folder, shard_bytes) as writer:
        for each in entries:
            writer.add(each)
    return writer.written


SHAPES = st.lists(st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(WHOLE_BYTES), SHAPES), min_size=1, max_size=12), st.integers(1, 400))
def test_written_tensors_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, list[int]]], shard_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("written")
    entries = [entry(f"tensor {number}", kind, *shape) for number, (kind, shape) in enumerate(kinds)]
    paths = write(folder, entries, shard_bytes)
    assert sorted(paths) == sorted(folder.iterdir())
    with SafetensorsShards(folder) as checkpoint:
        assert checkpoint.tensors.keys() == {each.name for each in entries}
        for each in entries:
            tensor = checkpoint.tensors[each.name]
            assert (tensor.type.name, tensor.shape) == (each.type_name, each.shape)
            assert checkpoint.data(each.name) == each.data
            assert tensor.offset % max(1, tensor.type.bits // 8) == 0
    read: dict[str, bytes] = {}
    for path in paths:
        if path.suffix == ".safetensors":
            read |= read_by_the_package(path.read_bytes())
    assert read == {each.name: each.data for each in entries}


def test_shards_are_at_most_the_requested_size(tmp_path: Path) -> None:
    entries = [entry(f"t{number}", "U8", size) for number, size in enumerate((400, 600, 8, 1000, 5000, 3, 992))]
    paths = write(tmp_path, entries, 1000)
    assert [path.name for path in paths] == [
        *(f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)),
        "model.safetensors.index.json",
    ]
    index = json.loads(paths[-1].read_text())
    assert index["metadata"]["total_size"] == 8003
    shards = [[name for name, shard in index["weight_map"].items() if shard == path.name] for path in paths[:-1]]
    assert shards == [["t0", "t1"], ["t2"], ["t3"], ["t4"], ["t6", "t5"]]


def test_full_header_starts_another_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_writer, "HEADER_BYTES", 512)
    paths = write(tmp_path, [entry(f"näme {number}", "F32", 2) for number in range(40)])
    assert len(paths) > 5
    for path in paths[:-1]:
        assert SafetensorsFile(path).tensors
        assert path.stat().st_size < 600


def test_single_file_has_the_standard_name_and_format(tmp_path: Path) -> None:
    assert write(tmp_path, [entry("t", "BF16", 3)]) == [tmp_path / "model.safetensors"]
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("count", [0, 1, 5])
def test_interrupted_write_removes_all_files(tmp_path: Path, count: int) -> None:
    def tensors() -> Iterable[Entry]:
        for number in range(count):
            yield entry(f"t{number}", "U8", 100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, tensors(), 150)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", ["replace", "open"])
def test_failed_finish_removes_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """The disk fails at the third file, or at the second rename."""
    calls = 0
    original = getattr(Path, at)

    def refuse(self: Path, *arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "No space left on device", str(self))
        return original(self, *arguments, **options)

    monkeypatch.setattr(Path, at, refuse)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, [entry(f"t{number}", "U8", 100) for number in range(4)], 150)
    assert list(tmp_path.iterdir()) == []


def test_files_get_their_names_at_the_end(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path, 100) as writer:
        for number in range(3):
            writer.add(entry(f"t{number}", "U8", 100))
            assert not list(tmp_path.glob("*.safetensors"))
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


@pytest.mark.parametrize("name", ["t", "__metadata__"])
def test_duplicate_tensor_name_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        write(tmp_path, [entry("t", "U8", 1), entry(name, "U8", 1)])
    assert list(tmp_path.iterdir()) == []
