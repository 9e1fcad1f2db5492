"""Structure-aware fuzzing of the GGUF reader: any damaged file is read, or rejected with `GGUFError`.

The full run is `pytest tests/quant/test_gguf_mutations.py --mutations 10000`.
"""

import random
from pathlib import Path

import pytest

from quant.errors import GGUFError
from quant.gguf import GGUFFile
from tests.quant.mutants import assert_read_or_rejected
from tests.support.gguf_bytes import STRING, U32, GGUFBytes, Tensor, build, small_file

EXTREMES = [0, 1, 2, 3, 7, 8, 9, 31, 33, 2**16, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


def vocabulary_file() -> GGUFBytes:
    tokens = [f"token{i}" for i in range(500)]
    return build([("general.architecture", STRING, "llama"), ("tokenizer.ggml.tokens", STRING, tokens)], [])


def many_tensors_file() -> GGUFBytes:
    tensors = [
        Tensor(f"blk.{i}.weight", [32, i % 3 + 1], 2 + i % 2, bytes((18 + 2 * (i % 2)) * (i % 3 + 1)))
        for i in range(60)
    ]
    return build([("general.alignment", U32, 64)], tensors, alignment=64)


SEEDS = [small_file(), small_file(version=2), vocabulary_file(), many_tensors_file(), build([], [])]


def mutate(file: GGUFBytes, rng: random.Random) -> bytes:
    """Make one to three changes: a header number, a flipped bit, a cut, or bytes copied, removed, or inserted."""
    data = bytearray(file.data)
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(7)
        if kind <= 2:
            number = rng.choice(file.numbers)
            value = rng.choice([*EXTREMES, rng.getrandbits(64), len(data), rng.randrange(len(data) + 1)])
            data[number.offset : number.offset + number.width] = (value % 256**number.width).to_bytes(
                number.width, "little"
            )
        elif kind == 3 and data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 4:
            del data[rng.randrange(len(data) + 1) :]
        elif kind == 5:
            start = rng.randrange(len(data) + 1)
            del data[start : start + rng.randrange(64)]
        else:
            start = rng.randrange(len(data) + 1)
            data[start:start] = data[: rng.randrange(64)] if rng.random() < 0.5 else rng.randbytes(rng.randrange(64))
    return bytes(data)


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_mutated_file_is_read_or_rejected(tmp_path: Path, seed: int, mutations: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "mutant.gguf"

    def read(data: bytes) -> None:
        with GGUFFile(path) as file:
            assert sum(len(bytes(file.data(name))) for name in file.tensors) <= len(data)

    def check(error: GGUFError) -> None:
        assert error.field
        assert 0 <= error.offset <= path.stat().st_size

    mutants = (mutate(SEEDS[seed], rng) for _ in range(mutations // len(SEEDS)))
    assert_read_or_rejected(path, mutants, read, GGUFError, check)
