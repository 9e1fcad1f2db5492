import json
import os
import re
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

import quant.safetensors
from quant import bounded_json
from quant.errors import ModelFileError, SafetensorsError
from quant.safetensors import MAX_HEADER_BYTES, SAFETENSORS_TYPES, SafetensorsFile
from quant.safetensors_values import TORCH_TYPES, values
from tests.quant.opened_files import open_descriptors
from tests.quant.safetensors_bytes import build, entry, file_bytes, read_by_the_package, small_file


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    return path


def rejection(tmp_path: Path, data: bytes) -> SafetensorsError:
    with pytest.raises(SafetensorsError) as caught:
        SafetensorsFile(write(tmp_path, data))
    assert caught.value.remedy
    return caught.value


def test_names_shapes_types_and_bytes_are_read(tmp_path: Path) -> None:
    with SafetensorsFile(write(tmp_path, small_file())) as file:
        assert list(file.tensors) == ["plain", "scale", "none", "bytes", "packed", "eight", "mångs"]
        assert file.tensors["plain"].shape == (2, 3)
        assert file.tensors["scale"].shape == ()
        assert file.tensors["none"].nbytes == 0
        assert file.tensors["packed"].type == SAFETENSORS_TYPES["F4"]
        assert bytes(file.data("plain")) == bytes(range(24))
        assert bytes(file.data("none")) == b""
        assert bytes(file.data("bytes")) == b"abc"
        assert bytes(file.data("packed")) == b"\x12\x34\x56"
        assert file.metadata == {"format": "pt", "note": 'a "quoted" {text}'}


@pytest.mark.parametrize("kind", sorted(TORCH_TYPES))
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 0, 4), (2, 3, 4, 1)])
def test_file_written_by_the_safetensors_package_is_read(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    dtype = TORCH_TYPES[kind]
    size = dtype.itemsize
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8)
    theirs = {"a.weight": raw.view(dtype).reshape(shape), "b": torch.arange(3, dtype=torch.float32)}
    path = tmp_path / "written.safetensors"
    safetensors.torch.save_file(theirs, path, metadata={"format": "pt"})
    with SafetensorsFile(path) as file:
        assert file.metadata == {"format": "pt"}
        assert file.tensors["a.weight"].type.name == kind
        ours = {name: values(tensor, file.data(name)) for name, tensor in file.tensors.items()}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert ours[name].shape == tensor.shape
        assert torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_type_table_equals_the_package() -> None:
    """The package accepts each type only in the size that the table has, and its error for an unknown type lists the
    same types.
    """
    for name, kind in SAFETENSORS_TYPES.items():
        for nbytes in (3, 4, 6, 8, 16, 32, 64, 128):
            file = build({"t": (name, [8], bytes(nbytes))})
            if nbytes == kind.bits:
                read_by_the_package(file)
            else:
                with pytest.raises(safetensors.SafetensorError):
                    read_by_the_package(file)
    with pytest.raises(safetensors.SafetensorError, match="unknown variant") as caught:
        read_by_the_package(build({"t": ("F128", [1], bytes(16))}))
    named = re.findall(r"`(\w+)`", str(caught.value))
    assert set(named) - {"F128"} == set(SAFETENSORS_TYPES)


@pytest.mark.parametrize("kind", sorted(SAFETENSORS_TYPES.keys() - TORCH_TYPES.keys()))
def test_error_names_undecodable_types(tmp_path: Path, kind: str) -> None:
    data = bytes(SAFETENSORS_TYPES[kind].bits)
    with SafetensorsFile(write(tmp_path, build({"odd.weight": (kind, [8], data)}))) as file:
        assert bytes(file.data("odd.weight")) == data
        with pytest.raises(ModelFileError, match=f"odd.weight is stored as {kind}") as caught:
            values(file.tensors["odd.weight"], file.data("odd.weight"))
    assert "BF16" in caught.value.remedy


FOUR = entry("F32", [1], 0, 4)
HOSTILE: list[
    tuple[Mapping[str, object] | str | bytes, int, str, str]
] = [  # (header, data, part of the field's name, part of the problem)
    ("[]", 0, "header", "brace"),
    ("{", 0, "header", "JSON"),
    ("{} {}", 0, "header", "JSON"),
    ('{"a":NaN}', 0, "header", "NaN"),
    ('{"a":-Infinity}', 0, "header", "Infinity"),
    (b'{"a\xff":1}', 0, "header", "UTF-8"),
    ('{"a":[' * 5000, 0, "header", "nested"),
    ('{"a":' + "9" * 5000 + "}", 0, "header", "digits"),
    ('{"t":1,"t":2}', 0, "header", "t appears twice"),
    ('{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', 1, "header", "dtype appears twice"),
    ('{"__metadata__":{},"__metadata__":{}}', 0, "header", "twice"),
    ('{"__metadata__":{"a":"b","a":"b"}}', 0, "header", "twice"),
    ({"__metadata__": []}, 0, "__metadata__", "not an object"),
    ({"__metadata__": {"k": 1}}, 0, "__metadata__, k", "not a string"),
    ('{"__metadata__":{"k":"\\ud800"}}', 0, "__metadata__, k", "Unicode"),
    ({"": FOUR}, 4, "name ''", "1 to 1024"),
    ({"x" * 1025: FOUR}, 4, "name x", "1 to 1024"),
    ({"a\x1b[2J": FOUR}, 4, "\\x1b", "printable"),
    ('{"\\ud800":{}}', 0, "\\ud800", "printable"),
    ({"a": 5}, 0, "a", "not an object"),
    ({"a": {"dtype": "F32", "shape": [1]}}, 4, "a", "not an object of"),
    ({"a": {**FOUR, "strides": [1]}}, 4, "a", "not an object of"),
    ({"a": entry("F128", [1], 0, 16)}, 16, "dtype of a", "F128"),
    ({"a": {**FOUR, "dtype": 7}}, 4, "dtype of a", "not a string"),
    ({"a": {**FOUR, "dtype": ["F32"]}}, 4, "dtype of a", "not a string"),
    ({"a": {**FOUR, "shape": 1}}, 4, "shape of a", "list"),
    ({"a": {**FOUR, "shape": [1] * 9}}, 4, "shape of a", "list"),
    ({"a": {**FOUR, "shape": [True]}}, 4, "shape of a", "integer"),
    ({"a": {**FOUR, "shape": [1.0]}}, 4, "shape of a", "integer"),
    ({"a": {**FOUR, "shape": [-1, -1]}}, 4, "shape of a", "integer"),
    ({"a": {**FOUR, "shape": [2**63]}}, 4, "shape of a", "integer"),
    ({"a": {**FOUR, "shape": [2**62 + 1, 4]}}, 4, "data_offsets of a", "takes"),
    ({"a": {**FOUR, "shape": [2]}}, 4, "data_offsets of a", "takes 8 bytes"),
    ({"a": entry("F4", [3], 0, 1)}, 1, "data_offsets of a", "takes 1.5 bytes"),
    ({"a": {**FOUR, "data_offsets": [0]}}, 4, "data_offsets of a", "a start"),
    ({"a": {**FOUR, "data_offsets": [0, 4, 4]}}, 4, "data_offsets of a", "a start"),
    ({"a": {**FOUR, "data_offsets": [4, 0]}}, 4, "data_offsets of a", "a start"),
    ({"a": {**FOUR, "data_offsets": [0, "4"]}}, 4, "data_offsets of a", "integer"),
    ({"a": FOUR}, 3, "data_offsets of a", "within 3 bytes"),
    ({"a": FOUR}, 5, "header", "the tensors end at"),
    ({}, 1, "header", "the tensors end at"),
    ({"a": entry("F32", [1], 4, 8)}, 8, "data_offsets of a", "gap after the header"),
    ({"a": FOUR, "b": entry("U8", [2], 5, 7)}, 7, "data_offsets of b", "gap after a"),
    ({"a": FOUR, "b": FOUR}, 4, "data_offsets of b", "overlap a"),
    ({"a": FOUR, "b": entry("U8", [4], 3, 7)}, 7, "data_offsets of b", "overlap a"),
    ({"a": FOUR, "b": entry("U8", [0], 2, 2)}, 4, "data_offsets of b", "overlap a"),
]


@pytest.mark.parametrize(("header", "nbytes", "field", "problem"), HOSTILE)
def test_malformed_header_names_the_field(
    tmp_path: Path, header: Mapping[str, object] | str | bytes, nbytes: int, field: str, problem: str
) -> None:
    error = rejection(tmp_path, file_bytes(header, bytes(nbytes)))
    assert field in error.field
    assert problem in error.problem
    assert str(error).isprintable()


@pytest.mark.parametrize("length", [0, 1, 4096, 2**31, 2**40, 2**63 - 1, 2**64 - 1])
def test_forged_header_length_is_rejected(tmp_path: Path, length: int) -> None:
    error = rejection(tmp_path, file_bytes({"a": FOUR}, bytes(4), length=length))
    assert error.field == ("header" if length <= 1 else "header length")


def test_every_truncation_is_rejected(tmp_path: Path) -> None:
    whole = small_file()
    for length in range(len(whole)):
        rejection(tmp_path, whole[:length])
    rejection(tmp_path, whole + b"\0")


def test_tensors_may_be_stored_in_any_order(tmp_path: Path) -> None:
    header = {"b": entry("U8", [2], 3, 5), "none": entry("U8", [0], 3, 3), "a": entry("U8", [3], 0, 3)}
    with SafetensorsFile(write(tmp_path, file_bytes(header, b"abcde"))) as file:
        assert {name: bytes(file.data(name)) for name in file.tensors} == {"b": b"de", "none": b"", "a": b"abc"}


def test_padded_header_is_read(tmp_path: Path) -> None:
    with SafetensorsFile(write(tmp_path, file_bytes(json.dumps({"a": FOUR}) + " " * 13, bytes(4)))) as file:
        assert bytes(file.data("a")) == bytes(4)


def test_digest_depends_on_header_and_length(tmp_path: Path) -> None:
    def digest(data: bytes) -> str:
        with SafetensorsFile(write(tmp_path, data)) as file:
            return file.header_digest

    one = digest(build({"a": ("U8", [4], b"abcd")}))
    assert digest(build({"a": ("U8", [4], b"efgh")})) == one
    assert len({one, digest(build({"b": ("U8", [4], b"abcd")})), digest(build({"a": ("U8", [5], b"abcde")}))}) == 3


def test_non_regular_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="Cannot open"):
        SafetensorsFile(tmp_path / "missing.safetensors")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe):
        with pytest.raises(ModelFileError, match="regular"):
            SafetensorsFile(path)


def test_data_belongs_to_the_caller(tmp_path: Path) -> None:
    with SafetensorsFile(write(tmp_path, small_file())) as file:
        first = file.data("plain")
        first[0] = 7
        assert bytes(file.data("plain")) == bytes(range(24))
    assert bytes(first) == bytes([7, *range(1, 24)])


def test_empty_tensor_at_the_end_of_a_file_is_read(tmp_path: Path) -> None:
    header = {"a": entry("U8", [1000], 0, 1000), "none": entry("U8", [0], 1000, 1000)}
    with SafetensorsFile(write(tmp_path, file_bytes(header, bytes(1000)))) as file:
        assert bytes(file.data("none")) == b""


def test_all_files_are_closed(tmp_path: Path) -> None:
    with SafetensorsFile(write(tmp_path, small_file())) as file:
        bytes(file.data("plain"))
        assert open_descriptors(tmp_path) == [str(file.path)]
    assert open_descriptors(tmp_path) == []
    file.close()
    rejection(tmp_path, file_bytes({"a": FOUR}, bytes(5)))
    assert open_descriptors(tmp_path) == []


def peak_of_opening(path: Path) -> int:
    """Return the most bytes that Python allocates while the file is opened or rejected."""
    tracemalloc.start()
    try:
        with SafetensorsFile(path):
            pass
    except SafetensorsError:
        pass
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return most


def test_opening_allocates_memory_for_the_header_only(tmp_path: Path) -> None:
    """The sparse file has 3 GB."""
    extent = 3 << 30
    path = write(tmp_path, file_bytes({"a": entry("U8", [extent], 0, extent)}))
    os.truncate(path, path.stat().st_size + extent)
    assert peak_of_opening(path) < 1 << 20


def test_forged_length_allocates_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, file_bytes("{", length=MAX_HEADER_BYTES + 1))
    os.truncate(path, 8 << 30)
    assert peak_of_opening(path) < 1 << 20
    with pytest.raises(SafetensorsError, match="over the limit"):
        SafetensorsFile(path)


@pytest.mark.parametrize("value", [b"[],", b"{},", b'"ab",', b"0,", b"1e9,", b'{"a":0},'], ids=bytes.decode)
@pytest.mark.parametrize(
    "text", ["", "😀" + "x" * (1 << 20), "😀" + "\\n" * (1 << 20)], ids=["values", "text", "escapes"]
)
def test_hostile_header_is_parsed_in_limited_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: bytes, text: str
) -> None:
    """The header has the maximum number of values, of the costliest kinds, after text of 4 bytes per character."""
    monkeypatch.setattr(bounded_json, "MAX_VALUES", most := 1 << 15)
    separators = sum(value.count(mark) for mark in (b",", b"[", b"{"))
    raw = b'{"a":["' + text.encode() + b'",' + value * ((most - 10) // separators) + b"0]}"
    assert rejection(tmp_path, file_bytes(raw)).field == "a"
    assert peak_of_opening(tmp_path / "model.safetensors") < 10 * len(raw) + most * bounded_json.VALUE_BYTES


def test_header_with_too_many_values_is_not_parsed(tmp_path: Path) -> None:
    raw = b'{"a":[' + b"[]," * bounded_json.MAX_VALUES + b"0]}"
    assert "more than" in rejection(tmp_path, file_bytes(raw)).problem
    assert peak_of_opening(tmp_path / "model.safetensors") < 2.1 * len(raw)


def test_number_of_tensors_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant.safetensors, "MAX_TENSORS", 1000)
    header = {f"model.layers.{i}.weight": entry("U8", [1, 1, 1, 1], i, i + 1) for i in range(1000)}
    with SafetensorsFile(write(tmp_path, file_bytes(header, bytes(1000)))) as file:
        assert len(file.tensors) == 1000
    header["more"] = entry("U8", [0], 0, 0)
    assert "over the limit" in rejection(tmp_path, file_bytes(header, bytes(1000))).problem
