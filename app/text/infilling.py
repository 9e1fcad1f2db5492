"""Infilling, or fill in the middle: prompts for the missing text between two others (arXiv:2207.14255).

Three control tokens mark the prefix, the suffix, and the position of the missing text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

REPOSITORY, THIS_FILE = "repository", "file"  # names that prompts use, because clients send none


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """The control tokens of one model family, by text."""

    prefix: str
    suffix: str
    middle: str = ""  # empty if the reply follows the prefix directly; the prefix then comes last
    suffix_first: bool = False
    repository: str = ""  # precedes the name of a repository; this and the next token are not in every vocabulary
    file: str = ""  # precedes the name of a file, a line break, and its text


@dataclass(frozen=True, slots=True)
class OtherFile:
    """An excerpt of another file, as context for the missing text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """The missing text between a prefix and a suffix."""

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
    """The control tokens of one vocabulary."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    repository: int | None = None
    file: int | None = None

    @classmethod
    def of(cls, control_tokens: Mapping[str, int]) -> "Infilling | None":
        """Find the infilling tokens of a vocabulary, or return None if it has none."""
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
        """Yield the prompt as control tokens and non-empty plain texts."""
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
        """Yield other files in the format that the family was trained on (arXiv:2409.12186), or else as snippets."""
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
