"""Split GGUF models: reading all parts, and rejecting parts that do not fit together."""

import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import pytest

from quant.errors import GGUFError, ModelFileError
from quant.gguf import GGUFFile, GGUFTensor
from quant.gguf_parts import MAX_PARTS, GGUFParts
from tests.quant.opened_files import open_descriptors
from tests.support.gguf_bytes import I32, STRING, U16, Tensor, Value, build, small_file
from tests.support.gguf_reader import Reader

ONE, TWO, THREE = (f"model-{number:05d}-of-00003.gguf" for number in (1, 2, 3))


def split_keys(number: int, count: int = 3, tensors: int = 3) -> list[tuple[str, int, Value]]:
    return [("split.no", U16, number), ("split.count", U16, count), ("split.tensors.count", I32, tensors)]


def write_part(path: Path, keys: list[tuple[str, int, Value]], *names: str) -> None:
    tensors = [Tensor(name, [2], 0, struct.pack("<2f", index, len(name))) for index, name in enumerate(names)]
    path.write_bytes(build([("general.name", STRING, path.name), *keys], tensors).data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in three parts, the first without tensors, as `gguf-split --no-tensor-first-split` makes it."""
    write_part(tmp_path / ONE, split_keys(0))
    write_part(tmp_path / TWO, split_keys(1), "a", "bc")
    write_part(tmp_path / THREE, split_keys(2), "d")
    return tmp_path


def rejection(path: Path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        GGUFParts(path)
    assert caught.value.remedy
    assert str(caught.value).isprintable()
    return caught.value


@pytest.mark.parametrize("name", [ONE, TWO, THREE])
def test_any_part_opens_all_parts(folder: Path, name: str) -> None:
    with GGUFParts(folder / name) as checkpoint:
        assert checkpoint.path == folder / ONE
        assert checkpoint.metadata["general.name"] == ONE
        assert list(checkpoint.tensors) == ["a", "bc", "d"]
        assert {n: struct.unpack("<2f", checkpoint.data(n)) for n in checkpoint.tensors} == {
            "a": (0, 1),
            "bc": (1, 2),
            "d": (0, 1),
        }
        with pytest.raises(KeyError):
            checkpoint.data("e")


def test_split_model_equals_the_whole_model(smollm2: Path, tmp_path: Path) -> None:
    """The model is split with the `gguf` package's writer."""
    reader = Reader(smollm2)
    writer = gguf.GGUFWriter(tmp_path / "smollm2.gguf", "llama", split_max_tensors=100)
    for stored in reader.tensors:
        writer.add_tensor(stored.name, stored.data, raw_dtype=stored.tensor_type)
    writer.add_name("SmolLM2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"smollm2-{n:05d}-of-00003.gguf" for n in (1, 2, 3)]
    with GGUFFile(smollm2) as whole, GGUFParts(parts[1]) as split:
        assert split.metadata["general.name"] == "SmolLM2"
        assert matrix_types(split.tensors) == matrix_types(whole.tensors)
        assert split.tensors.keys() == whole.tensors.keys()
        for name, tensor in whole.tensors.items():
            other = split.tensors[name]
            assert (other.type, other.shape, other.nbytes) == (tensor.type, tensor.shape, tensor.nbytes)
            assert split.data(name) == whole.data(name)


def matrix_types(tensors: Mapping[str, GGUFTensor]) -> set[str]:
    """Return the names of the matrices' types."""
    return {tensor.type.name for tensor in tensors.values() if len(tensor.shape) == 2}


def test_single_file_equals_the_gguf_reader(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_file().data)
    with GGUFFile(path) as file, GGUFParts(path) as checkpoint:
        assert (checkpoint.path, checkpoint.metadata, checkpoint.tensors) == (path, file.metadata, file.tensors)
        assert checkpoint.header_digest == file.header_digest
        assert all(checkpoint.data(name) == file.data(name) for name in file.tensors)


@pytest.mark.parametrize("keys", [[], split_keys(0, 1, 1)])
def test_single_part_is_a_whole_model(tmp_path: Path, keys: list[tuple[str, int, Value]]) -> None:
    path = tmp_path / "model-00001-of-00001.gguf"
    write_part(path, keys, "a")
    with GGUFParts(path) as checkpoint:
        assert list(checkpoint.tensors) == ["a"]


@pytest.mark.parametrize(
    ("gone", "named", "words"), [((TWO,), ONE, TWO), ((ONE, TWO), THREE, f"{ONE} is missing, and")]
)
def test_error_names_the_missing_part(folder: Path, gone: tuple[str, ...], named: str, words: str) -> None:
    for name in gone:
        (folder / name).unlink()
    problem = rejection(folder / named)
    assert words in problem.message
    assert "3 parts" in problem.message


def test_missing_file_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="Cannot open"):
        GGUFParts(tmp_path / "nothing.gguf")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([], "split.count is missing, but the file names and the number of parts require 3"),
        (split_keys(1, 4), "split.count is 4, but the file names and the number of parts require 3"),
        (split_keys(2), "split.no is 2, but the file names and the number of parts require 1"),
        (split_keys(1, 3, 4), "split.tensors.count is 4, but the file names and the number of parts require 3"),
        ([("split.no", STRING, "\x1b]0;x"), *split_keys(1)[1:]], "split.no is "),
        ([("split.no", U16, [1]), *split_keys(1)[1:]], r"split.no is (1,), but"),
    ],
)
def test_inconsistent_split_fields_are_rejected(folder: Path, keys: list[tuple[str, int, Value]], words: str) -> None:
    write_part(folder / TWO, keys, "a", "bc")
    problem = rejection(folder / ONE)
    assert words in problem.message
    assert TWO in problem.message


def test_parts_must_have_the_stated_number_of_tensors(folder: Path) -> None:
    write_part(folder / TWO, split_keys(1), "a")
    assert (
        "split.tensors.count is 3, but the file names and the number of parts require 2"
        in rejection(folder / ONE).message
    )


def test_tensor_in_two_parts_is_rejected(folder: Path) -> None:
    write_part(folder / TWO, split_keys(1), "a", "d")
    assert f"{THREE}: {TWO} also has the tensor d" in rejection(folder / ONE).message


def test_renamed_part_is_rejected(folder: Path) -> None:
    (folder / TWO).rename(folder / "two.gguf")
    assert (
        "split.count is 3, but the file names and the number of parts require 1"
        in rejection(folder / "two.gguf").message
    )


@pytest.mark.parametrize(
    "name", ["m-00000-of-00002.gguf", "m-00003-of-00002.gguf", f"m-00001-of-{MAX_PARTS + 1:05d}.gguf"]
)
def test_impossible_part_numbers_are_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert "has the name of part" in rejection(tmp_path / name).message


def test_error_names_the_damaged_part_and_all_files_are_closed(folder: Path) -> None:
    (folder / THREE).write_bytes(b"GGUF")
    with pytest.raises(GGUFError, match=THREE) as caught:
        GGUFParts(folder / ONE)
    caught.value.__traceback__ = None
    assert open_descriptors(folder) == []


def test_digest_depends_on_all_headers(folder: Path) -> None:
    def digest() -> str:
        with GGUFParts(folder / ONE) as checkpoint:
            return checkpoint.header_digest

    first = digest()
    assert digest() == first
    write_part(folder / THREE, split_keys(2), "e")
    assert digest() != first
