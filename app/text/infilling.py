"""Infilling: how a vocabulary asks its model for what is missing in the middle of a text (arXiv:2207.14255).

Three control tokens say where the text before and the text behind begin, and where the model is to write. Knows the
families' tokens, and their order. Refuses to know how texts become ids.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

REPOSITORY, THIS_FILE = "repository", "file"  # as what they are named, since nobody says


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """The tokens of one family, by text."""

    prefix: str
    suffix: str
    middle: str = ""  # empty: the model writes behind the prefix, which comes last
    suffix_first: bool = False
    repository: str = ""  # a name of a repository follows; this and the next one only where a vocabulary has them
    file: str = ""  # the name of a file, a line break and its text follow


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A part of a file that may have a say in what is missing in another."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """What is missing between two texts."""

    prefix: str
    suffix: str
    others: Sequence[OtherFile] = ()

    @property
    def characters(self) -> int:
        return len(self.prefix) + len(self.suffix) + sum(len(other.text) for other in self.others)


MARKS = (
    InfillMarks(  # Qwen, CodeGemma, SmolLM-code
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", repository="<|repo_name|>", file="<|file_sep|>"
    ),
    InfillMarks(  # StarCoder, Granite, Refact
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", repository="<repo_name>", file="<file_sep>"
    ),
    InfillMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillMarks("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    InfillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    InfillMarks("<|fim_start|>", "<|fim_suffix|>", "<|fim_middle|>"),
    InfillMarks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4, CodeGeeX
    InfillMarks("<PRE>", "<SUF>", "<MID>"),  # Code Llama
    InfillMarks("▁<PRE>", "▁<SUF>", "▁<MID>"),
    InfillMarks("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)


@dataclass(frozen=True, slots=True)
class Infilling:
    """The tokens of one vocabulary."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    repository: int | None = None
    file: int | None = None

    @classmethod
    def of(cls, control_tokens: Mapping[str, int]) -> "Infilling | None":
        """None where the vocabulary has no such tokens."""
        for marks in MARKS:
            wanted = [text for text in (marks.prefix, marks.suffix, marks.middle) if text]
            if all(text in control_tokens for text in wanted):
                middle = control_tokens[marks.middle] if marks.middle else None
                return cls(
                    control_tokens[marks.prefix],
                    control_tokens[marks.suffix],
                    middle,
                    marks.suffix_first,
                    control_tokens.get(marks.repository),
                    control_tokens.get(marks.file),
                )
        return None

    def parts(self, gap: Gap) -> Iterator[int | str]:
        """The prompt as control tokens and non-empty plain texts."""
        if gap.others:
            yield from self._others(gap.others)
        halves = [(self.prefix, gap.prefix), (self.suffix, gap.suffix)]
        for token_id, text in reversed(halves) if self.suffix_first else halves:
            yield token_id
            if text:
                yield text
        if self.middle is not None:
            yield self.middle

    def _others(self, others: Sequence[OtherFile]) -> Iterator[int | str]:
        """Other files as the family was taught them (arXiv:2409.12186); as snippets, where it was not."""
        if self.file is None:
            yield "".join(f"\n\n--- snippet ---\n\n{other.text}\n" for other in others)
            return
        if self.repository is not None:
            yield self.repository
            yield f"{REPOSITORY}\n"
        for other in others:
            yield self.file
            yield f"{other.name}\n{other.text}\n"
        yield self.file
        yield f"{THIS_FILE}\n"
