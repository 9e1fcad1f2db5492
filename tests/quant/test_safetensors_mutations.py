"""Structure-aware fuzzing of the safetensors reader: any damaged file is read, or rejected with one error.

The `safetensors` package must read the same tensors from a file that is read. The full run is `pytest
tests/quant/test_safetensors_mutations.py --mutations 10000`.
"""

import json
import random
import re
from pathlib import Path

import pytest

from quant.errors import ModelFileError, SafetensorsError
from quant.safetensors import SafetensorsFile
from quant.safetensors_shards import INDEX, SafetensorsShards
from tests.quant.mutants import assert_read_or_rejected
from tests.quant.opened_files import opened_files
from tests.quant.safetensors_bytes import build, entry, file_bytes, read_by_the_package, small_file, write_shards

EXTREMES = ["0", "1", "3", "-1", "2147483648", "4294967296", "9223372036854775807", "18446744073709551615", "1" * 40]
WORDS = ["null", "true", "1.0", "1e400", "NaN", "[]", "{}", '""', '"F32"', '"F64"', '"\\ud800"', "[[[[", "__metadata__"]
NUMBER = re.compile(rb"\d+")


def many_tensors_file() -> bytes:
    return build({f"blk.{i}.weight": ("BF16", [i % 3 + 1, 4], bytes(8 * (i % 3 + 1))) for i in range(60)})


def out_of_order_file() -> bytes:
    header = {"b": entry("U8", [2], 3, 5), "none": entry("F32", [0], 3, 3), "a": entry("F8_E5M2", [3, 1], 0, 3)}
    return file_bytes(json.dumps(header, indent=1) + "   ", b"abcde")


SEEDS = [small_file(), many_tensors_file(), out_of_order_file(), build({}), build({"x": ("U8", [], b"x")}, {"a": ""})]


def mutate(data: bytearray, rng: random.Random) -> None:
    """Make one change: a number or a word of the header, the header's length, or some bytes anywhere."""
    kind = rng.randrange(8)
    numbers = [match.span() for match in NUMBER.finditer(data, 8)]
    at = rng.randrange(len(data) + 1)
    if kind <= 2 and numbers:
        start, end = rng.choice(numbers)
        data[start:end] = rng.choice([*EXTREMES, str(len(data)), str(rng.randrange(40))]).encode()
    elif kind == 3:
        data[:8] = rng.choice([*map(int, EXTREMES[:2]), len(data), 2**40, 2**64 - 1]).to_bytes(8, "little")
    elif kind == 4 and data:
        data[at - 1] ^= 1 << rng.randrange(8)
    elif kind == 5:
        del data[at : at + rng.choice([1, 64, len(data)])]
    elif kind == 6:
        data[at:at] = rng.choice(WORDS).encode()
    else:
        start = rng.randrange(len(data) + 1)
        data[at:at] = data[start : start + rng.randrange(64)]


def mutant(data: bytes, rng: random.Random) -> bytes:
    """Make one to three changes. In most cases, then correct the header's length."""
    changed = bytearray(data)
    header_end = 8 + int.from_bytes(data[:8], "little")
    for _ in range(rng.randint(1, 3)):
        mutate(changed, rng)
    if rng.random() < 0.7 and len(changed) >= 8:
        grown = len(changed) - len(data)
        changed[:8] = max(0, header_end - 8 + grown).to_bytes(8, "little")
    return bytes(changed)


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_mutated_file_is_read_or_rejected(tmp_path: Path, seed: int, mutations: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "mutant.safetensors"

    def read(data: bytes) -> None:
        with SafetensorsFile(path) as file:
            assert read_by_the_package(data) == {name: bytes(file.data(name)) for name in file.tensors}

    def check(error: SafetensorsError) -> None:
        assert error.field

    mutants = (mutant(SEEDS[seed], rng) if turn else SEEDS[seed] for turn in range(mutations // len(SEEDS)))
    assert_read_or_rejected(path, mutants, read, SafetensorsError, check)


SHARD_NAMES = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
PATHS = [b"../", b"/", b"..\\\\", b"/etc/passwd", b"C:", b"\\u0000", b"model-00001-of-00003.safetensors", b".."]


def mutant_index(data: bytes, rng: random.Random) -> bytes:
    """Make one to three changes, some of which insert hostile paths."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.4:
            at = rng.randrange(len(changed) + 1)
            changed[at:at] = rng.choice(PATHS)
        else:
            mutate(changed, rng)
    return bytes(changed)


def test_mutated_index_is_read_or_rejected(tmp_path: Path, mutations: int) -> None:
    """A damaged index opens no file outside the folder, and the tensors that are read are those of the shards."""
    write_shards(tmp_path, {name: {f"{name[10]}.{i}": ("U8", [i], bytes(i)) for i in range(3)} for name in SHARD_NAMES})
    whole = (tmp_path / INDEX).read_bytes()
    rng = random.Random(0)

    def read(data: bytes) -> None:
        with SafetensorsShards(tmp_path) as checkpoint:
            assert len(checkpoint.tensors) == 9

    mutants = (mutant_index(whole, rng) if turn else whole for turn in range(mutations))
    with opened_files() as opens:
        assert_read_or_rejected(tmp_path / INDEX, mutants, read, ModelFileError)
    assert {str(tmp_path / name) for name in [INDEX, *SHARD_NAMES]} == set(opens)
