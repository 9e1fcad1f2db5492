import errno
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

import quant.gguf
from quant import tensor_file
from quant.errors import GGUFError, ModelFileError
from quant.ggml_blocks import BLOCKS, PLAIN_TYPES
from quant.ggml_types import ggml_types
from quant.gguf import GGUFFile
from quant.tensor_file import WHOLE, Slab
from tests.support import gguf_bytes
from tests.support.gguf_bytes import F32, STRING, U8, U32, GGUFBytes, Tensor, build, small_file


def write(tmp_path: Path, data: bytes | bytearray) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def rejection(tmp_path: Path, file: GGUFBytes) -> GGUFError:
    with pytest.raises(GGUFError) as caught:
        GGUFFile(write(tmp_path, file.data))
    return caught.value


def put(file: GGUFBytes, role: str, value: int, which: int = 0) -> GGUFBytes:
    """Replace the number with index `which` among the numbers of this role in `file`."""
    number = [n for n in file.numbers if n.role == role][which]
    file.data[number.offset : number.offset + number.width] = value.to_bytes(number.width, "little")
    return file


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value_and_tensor_is_read(tmp_path: Path, version: int) -> None:
    with GGUFFile(write(tmp_path, small_file(version=version).data)) as file:
        assert file.version == version
        assert file.metadata["a.u8"] == 200
        assert file.metadata["a.i8"] == -5
        assert file.metadata["a.u64"] == 2**63
        assert file.metadata["a.i64"] == -(2**40)
        assert file.metadata["a.f32"] == 0.5
        assert file.metadata["a.f64"] == 1e-300
        assert file.metadata["a.bool"] is True
        assert file.metadata["a.text"] == "grüße"
        assert file.metadata["a.tokens"] == ("a", "", "ß", "▁the", "<|end|>")
        assert file.metadata["a.scores"] == (0.0, -1.5, -2.25)
        assert file.metadata["a.flags"] == (False, True, True)
        assert file.metadata["a.empty"] == ()
        assert file.tensors["plain"].shape == (2, 3)
        assert file.tensors["q8"].shape == (2, 2, 32)
        assert struct.unpack("<6f", file.data("plain")) == (0, 1, 2, 3, 4, 5)
        assert bytes(file.data("q4")) == bytes(range(108))


def test_file_written_by_the_gguf_package_is_read(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(1234)
    writer.add_token_list(["<s>", "ä", "b"])
    writer.add_token_scores([0.0, -1.0, -2.5])
    values = np.random.default_rng(7).standard_normal((5, 64), np.float32)
    quantized = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("plain", values)
    writer.add_tensor("packed", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as file:
        assert file.metadata["llama.context_length"] == 1234
        assert file.metadata["tokenizer.ggml.tokens"] == ("<s>", "ä", "b")
        assert np.array_equal(np.frombuffer(file.data("plain"), np.float32).reshape(5, 64), values)
        assert bytes(file.data("packed")) == quantized.tobytes()
        assert file.tensors["packed"].type.name == "Q4_1"


# Source: ggml.h and ggml-common.h of llama.cpp.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


def test_decoded_types_have_the_sizes_of_the_format() -> None:
    decoded = {*BLOCKS, *PLAIN_TYPES}
    sizes = {
        number: (kind.name, kind.block_elements, kind.block_bytes)
        for number, kind in ggml_types().items()
        if kind.name in decoded
    }
    assert sizes == TYPES


@pytest.mark.parametrize(
    ("role", "which", "value", "names"),
    [
        ("version", 0, 1, "version"),
        ("version", 0, 4, "version"),
        ("tensor count", 0, 2**63, "tensor count"),
        ("tensor count", 0, 100_000, "tensor count"),
        ("metadata count", 0, 2**64 - 1, "metadata count"),
        ("metadata count", 0, 60_000, "metadata count"),
        ("length of key", 0, 2**40, "key of metadata entry 0"),
        ("length of string", 0, 2**64 - 1, "general.architecture"),
        ("value type", 0, 13, "general.architecture"),
        ("element type", 0, 9, "a.tokens"),
        ("element type", 0, 77, "a.tokens"),
        ("array length", 0, 2**40, "a.tokens"),
        ("array length", 1, 2**62, "a.scores"),
        ("length of string", 3, 2**63, "a.tokens[1]"),
        ("dimension count", 0, 0, "plain"),
        ("dimension count", 0, 5, "plain"),
        ("dimension count", 0, 2**32 - 1, "plain"),
        ("dimension", 0, 0, "plain"),
        ("dimension", 0, 2**64 - 1, "plain"),
        ("dimension", 3, 65, "q4"),
        ("dimension", 1, 2**40, "plain"),
        ("tensor type", 0, 4, "plain"),
        ("tensor offset", 1, 33, "half"),
        ("tensor offset", 1, 0, "half"),
        ("tensor offset", 3, 2**64 - 32, "q8"),
        ("tensor offset", 3, 2**20, "q8"),
    ],
)
def test_error_names_the_field_of_a_forged_number(
    tmp_path: Path, role: str, which: int, value: int, names: str
) -> None:
    error = rejection(tmp_path, put(small_file(), role, value, which))
    assert names in error.field
    assert 0 <= error.offset <= len(small_file().data)
    assert str(error.offset) in str(error)
    assert error.remedy


@pytest.mark.parametrize(
    ("role", "count"), [("tensor count", 100_000), ("metadata count", 60_000), ("array length", 1 << 20)]
)
def test_count_that_exceeds_the_file_is_refused_at_once(tmp_path: Path, role: str, count: int) -> None:
    error = rejection(tmp_path, put(small_file(), role, count, 0))
    assert error.problem == f"{count} is more than the rest of the file can hold"


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**31, 2**21])
def test_alignment_must_be_a_power_of_two_within_limits(tmp_path: Path, alignment: int) -> None:
    file = build([("general.alignment", U32, alignment)], [])
    assert rejection(tmp_path, file).field == "general.alignment"


def test_alignment_must_be_an_integer(tmp_path: Path) -> None:
    assert rejection(tmp_path, build([("general.alignment", STRING, "32")], [])).field == "general.alignment"


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    tensors = [Tensor("one", [1], 0, struct.pack("<f", 1.0)), Tensor("two", [1], 0, struct.pack("<f", 2.0))]
    file = build([("general.alignment", U32, 256)], tensors, alignment=256)
    with GGUFFile(write(tmp_path, file.data)) as opened:
        assert struct.unpack("<f", opened.data("two")) == (2.0,)
        assert opened.tensors["two"].offset % 256 == 0


def test_big_endian_file_is_rejected(tmp_path: Path) -> None:
    error = rejection(tmp_path, put(small_file(), "version", 3 << 24))
    assert "big endian" in error.problem


def test_other_file_formats_are_rejected(tmp_path: Path) -> None:
    for data in (b"", b"GG", b"PK\x03\x04" + bytes(64), b"GGML" + bytes(64)):
        with pytest.raises(GGUFError):
            GGUFFile(write(tmp_path, data))


def test_every_truncation_is_rejected(tmp_path: Path) -> None:
    whole = bytes(small_file().data)
    for length in range(len(whole)):
        with pytest.raises(GGUFError):
            GGUFFile(write(tmp_path, whole[:length]))


def test_repeated_keys_and_tensors_are_rejected(tmp_path: Path) -> None:
    assert "twice" in rejection(tmp_path, build([("k", U8, 1), ("k", U8, 2)], [])).problem
    twins = [Tensor("t", [1], 0, bytes(4)), Tensor("t", [1], 0, bytes(4))]
    assert "twice" in rejection(tmp_path, build([], twins)).problem


def test_metadata_text_must_be_utf8(tmp_path: Path) -> None:
    file = build([("k", STRING, ["fine", "?"])], [])
    file.data[file.data.rindex(b"?")] = 0xFF
    assert rejection(tmp_path, file).field == "k[1]"


def test_boolean_must_be_zero_or_one(tmp_path: Path) -> None:
    assert rejection(tmp_path, build([("k", gguf_bytes.BOOL, 2)], [])).field == "k"


def test_overlapping_tensors_are_rejected(tmp_path: Path) -> None:
    tensors = [Tensor("first", [16], 0, bytes(64)), Tensor("second", [16], 0, bytes(64))]
    error = rejection(tmp_path, put(build([], tensors), "tensor offset", 32, which=1))
    assert "overlap" in error.problem
    assert "second" in error.field


def test_tensors_may_be_stored_in_any_order(tmp_path: Path) -> None:
    tensors = [Tensor("b", [8], 0, struct.pack("<8f", *range(8))), Tensor("a", [8], 0, bytes(32))]
    file = put(put(build([], tensors), "tensor offset", 32, which=0), "tensor offset", 0, which=1)
    with GGUFFile(write(tmp_path, file.data)) as opened:
        assert list(opened.tensors) == ["b", "a"]
        assert opened.tensors["b"].offset > opened.tensors["a"].offset


def test_metadata_may_contain_nan(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path, build([("k", F32, float("nan"))], []).data)) as file:
        value = file.metadata["k"]
        assert value != value


def test_non_regular_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="regular"):
        GGUFFile(tmp_path)
    with pytest.raises(ModelFileError, match="Cannot open"):
        GGUFFile(tmp_path / "missing.gguf")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ModelFileError, match="regular"):
        GGUFFile(pipe)


def test_array_length_is_limited(tmp_path: Path) -> None:
    file = build([("k", U8, [0])], [])
    length = next(n for n in file.numbers if n.role == "array length")
    elements = 80 << 20
    file.data[length.offset : length.offset + 8] = elements.to_bytes(8, "little")
    path = write(tmp_path, file.data)
    os.truncate(path, len(file.data) + elements)
    with pytest.raises(GGUFError, match="over the limit"):
        GGUFFile(path)


def test_header_size_is_limited(tmp_path: Path) -> None:
    half_header = [("k" + str(i), STRING, "x" * (9 << 20)) for i in range(8)]
    with pytest.raises(GGUFError, match="the header exceeds"):
        GGUFFile(write(tmp_path, build(list(half_header), []).data))


def test_file_that_is_truncated_after_it_was_opened_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, small_file().data)
    with GGUFFile(path) as file:
        last = max(file.tensors.values(), key=lambda tensor: tensor.offset)
        size = last.offset + last.nbytes - 1
        os.truncate(path, size)
        with pytest.raises(ModelFileError, match=f"was truncated to {size:,} bytes"):
            file.data(last.name)
        with pytest.raises(ModelFileError, match=f"was truncated to {size:,} bytes"):
            file.read(last.name, WHOLE, last.nbytes - 1, last.nbytes)


def test_read_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with GGUFFile(write(tmp_path, small_file().data)) as file:
        monkeypatch.setattr(tensor_file, "_read_into", fail)
        with pytest.raises(ModelFileError, match=f"Cannot read .*model.gguf: {os.strerror(errno.EIO)}"):
            file.data("q4")


def test_long_header_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, small_file().data)
    with GGUFFile(path) as file:
        expected = file.metadata, file.tensors, file.header_digest
    for size in range(8, 1000, 7):
        monkeypatch.setattr(quant.gguf, "USUAL_HEADER_BYTES", size)
        with GGUFFile(path) as file:
            assert (file.metadata, file.tensors, file.header_digest) == expected


def test_tensor_is_read_in_parts(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path, small_file().data)) as file:
        assert bytes(file.read("q4", WHOLE, 5, 9)) == bytes(range(5, 9))
        assert bytes(file.read("q4", Slab(1, 2), 5, 9)) == bytes(range(59, 63))


def test_default_model_is_opened(smollm2: Path) -> None:
    with GGUFFile(smollm2) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert len(file.tensors) == 272
        assert sum(t.nbytes for t in file.tensors.values()) == 96_576_768
