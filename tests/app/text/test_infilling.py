"""Infilling prompts of all supported families."""

from collections.abc import Callable

import pytest

from app.text.infilling import MARKS, Gap, Infilling, InfillMarks, OtherFile
from app.text.tokenizer import Tokenizer


@pytest.mark.parametrize("marks", MARKS)
def test_tokens_of_each_family_are_found_and_ordered(marks: InfillMarks) -> None:
    ids = {text: number for number, text in enumerate(("<|im_end|>", marks.prefix, marks.suffix, marks.middle)) if text}
    infilling = Infilling.of(ids)
    assert infilling is not None
    parts = list(infilling.parts(Gap("a", "b")))
    assert parts == ([2, "b", 1, "a"] if marks.suffix_first else [1, "a", 2, "b", 3])
    assert list(infilling.parts(Gap("", "b")))[-1] == (1 if marks.suffix_first else 3)


def test_infilling_prompt_starts_with_other_files() -> None:
    gap = Gap("a", "b", [OtherFile("x.py", "1"), OtherFile("y.py", "2")])
    ids = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3, "<|repo_name|>": 4, "<|file_sep|>": 5}
    with_files, without = Infilling.of(ids), Infilling.of({text: ids[text] for text in list(ids)[:3]})
    assert with_files is not None
    assert without is not None
    others = [4, "repository\n", 5, "x.py\n1\n", 5, "y.py\n2\n", 5, "file\n"]
    assert list(with_files.parts(gap)) == [*others, 1, "a", 2, "b", 3]
    [snippets, *rest] = without.parts(gap)
    assert isinstance(snippets, str)
    assert snippets.index("1") < snippets.index("2")
    assert rest == [1, "a", 2, "b", 3]


def test_incomplete_set_of_infilling_tokens_is_not_used() -> None:
    assert Infilling.of({"<fim_prefix>": 1, "<fim_suffix>": 2}) is None
    assert Infilling.of({}) is None


@pytest.mark.parametrize(
    ("name", "found"), [("qwen2", False), ("starcoder", True), ("refact", True), ("deepseek-coder", True)]
)
def test_infilling_tokens_of_real_vocabularies_are_found(
    vocabularies: Callable[[str], Tokenizer], name: str, found: bool
) -> None:
    assert (Infilling.of(vocabularies(name).control_tokens) is not None) == found
