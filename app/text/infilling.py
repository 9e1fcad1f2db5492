"""Infilling: how a vocabulary asks its model for what is missing in the middle of a text (arXiv:2207.14255).

Three control tokens say where the text before and the text behind begin, and where the model is to write. Knows the
families' tokens, and their order. Refuses to know how texts become ids.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """The tokens of one family, by text."""

    prefix: str
    suffix: str
    middle: str = ""  # empty: the model writes behind the prefix, which comes last
    suffix_first: bool = False


MARKS = (
    InfillMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, SmolLM-code
    InfillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Refact
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

    @classmethod
    def of(cls, control_tokens: Mapping[str, int]) -> "Infilling | None":
        """None where the vocabulary has no such tokens."""
        for marks in MARKS:
            wanted = [text for text in (marks.prefix, marks.suffix, marks.middle) if text]
            if all(text in control_tokens for text in wanted):
                middle = control_tokens[marks.middle] if marks.middle else None
                return cls(
                    control_tokens[marks.prefix], control_tokens[marks.suffix], middle, suffix_first=marks.suffix_first
                )
        return None

    def parts(self, before: str, behind: str) -> Iterator[int | str]:
        """The prompt as control tokens and non-empty plain texts."""
        halves = [(self.prefix, before), (self.suffix, behind)]
        for token_id, text in reversed(halves) if self.suffix_first else halves:
            yield token_id
            if text:
                yield text
        if self.middle is not None:
            yield self.middle
