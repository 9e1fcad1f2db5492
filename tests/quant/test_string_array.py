import array
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from quant.gguf import GGUFFile
from quant.string_array import StringArray
from tests.support.gguf_bytes import STRING, build

TEXTS = ("a", "", "grüße", "▁the", "\0", "😀")


def packed(texts: Sequence[str]) -> StringArray:
    data, ends = b"", array.array("q", [0])
    for text in texts:
        data += len(text.encode()).to_bytes(8, "little") + text.encode()
        ends.append(len(data))
    return StringArray(data, ends)


def test_strings_are_found_by_index_slice_and_iteration() -> None:
    strings = packed(TEXTS)
    assert len(strings) == len(TEXTS)
    assert [strings[index] for index in range(-6, 6)] == [*TEXTS, *TEXTS]
    assert strings[1:5:2] == TEXTS[1:5:2]
    assert strings[::-1] == TEXTS[::-1]
    assert list(strings) == list(TEXTS)
    assert "grüße" in strings
    assert "gr" not in strings


@pytest.mark.parametrize("index", [6, -7])
def test_an_index_out_of_range_is_an_error(index: int) -> None:
    with pytest.raises(IndexError):
        packed(TEXTS)[index]


def test_strings_equal_sequences_of_the_same_strings_only() -> None:
    strings = packed(TEXTS)
    assert strings == TEXTS
    assert strings == list(TEXTS)
    assert strings == packed(TEXTS)
    assert strings != TEXTS[:-1]
    assert strings != (*TEXTS[:-1], "x")
    assert packed("ab") != "ab"
    assert packed(()) == ()
    assert repr(packed("ab")) == "<2 strings: 'a', 'b'>"


def test_a_vocabulary_takes_no_object_for_each_token(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build([("tokens", STRING, [f"token {i}" for i in range(20_000)])], []).data)
    GGUFFile(path).close()
    before = sys.getallocatedblocks()
    with GGUFFile(path) as file:
        assert sys.getallocatedblocks() - before < 500
        assert file.metadata["tokens"][19_999] == "token 19999"  # type: ignore[index]
