"""How vocabularies ask for what is missing in the middle."""

from pathlib import Path

import pytest

from app.text.gguf_tokenizer import from_gguf
from app.text.infilling import MARKS, Gap, Infilling, InfillMarks
from quant.gguf import GGUFFile


@pytest.mark.parametrize("marks", MARKS)
def test_each_familys_tokens_are_found_and_put_in_order(marks: InfillMarks) -> None:
    ids = {text: number for number, text in enumerate(("<|im_end|>", marks.prefix, marks.suffix, marks.middle)) if text}
    infilling = Infilling.of(ids)
    assert infilling is not None
    parts = list(infilling.parts(Gap("a", "b")))
    assert parts == ([2, "b", 1, "a"] if marks.suffix_first else [1, "a", 2, "b", 3])
    assert list(infilling.parts(Gap("", "b")))[-1] == (1 if marks.suffix_first else 3)


def test_some_of_the_tokens_are_not_enough() -> None:
    assert Infilling.of({"<fim_prefix>": 1, "<fim_suffix>": 2}) is None
    assert Infilling.of({}) is None


@pytest.mark.parametrize(
    ("name", "found"), [("qwen2", False), ("starcoder", True), ("refact", True), ("deepseek-coder", True)]
)
def test_real_vocabularies(llama_cpp_models: Path, name: str, found: bool) -> None:
    with GGUFFile(llama_cpp_models / f"ggml-vocab-{name}.gguf") as file:
        assert (Infilling.of(from_gguf(file.metadata).control_tokens) is not None) == found
