"""Collects the contents of a reply from a parser's events, and splits and mutates texts for tests."""

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from app.generation.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from app.generation.tool_parsers.reply_format import ReplyFormat
from app.generation.tool_parsers.reply_parser import FormatMarkup, ParsedEvent, ReplyParser
from app.generation.tool_parsers.tool_calls import Tools

_CONTROL = re.compile(
    r"(<\|[^|<>\s]*\|>|<｜[^｜<>]*｜>|</s>|<seed:eos>|\[e~\[|<turn\|>|<\|tool_response>|</assistant>|<sep>|<SPECIAL_12>"
    r"|<end_of_sentence>|<end_of_turn>)"
)
_NEXT_TURN = "<|START_OF_TURN_TOKEN|>"


@dataclass
class Call:
    name: str
    id: str
    arguments: str = ""
    ended: bool = False


@dataclass
class ParsedReply:
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, heard: ParsedEvent) -> None:
        match heard.event:
            case TextDelta(text):
                self.text += text
            case ReasoningDelta(text):
                self.reasoning += text
            case ToolCallStart(index, call_id, name):
                assert index == len(self.calls)
                self.calls.append(Call(name, call_id))
            case ToolCallDelta(index, arguments):
                assert not self.calls[index].ended
                self.calls[index].arguments += arguments
            case ToolCallEnd(index):
                self.calls[index].ended = True

    def contents(self) -> tuple[str, str, list[tuple[str, str, bool]]]:
        """Return everything in the reply except the ids of calls, which are random."""
        return self.text, self.reasoning, [(call.name, call.arguments, call.ended) for call in self.calls]


def parse_pieces(parser: ReplyParser, pieces: Iterable[str]) -> ParsedReply:
    parsed = ParsedReply()
    for piece in pieces:
        for heard in parser.push(piece):
            parsed.add(heard)
    for heard in parser.finish():
        parsed.add(heard)
    return parsed


def parsed(written: str | Iterable[str], format: ReplyFormat, tools: Tools, *, opening: str = "") -> ParsedReply:  # noqa: A002
    pieces = [written] if isinstance(written, str) else written
    return parse_pieces(ReplyParser(FormatMarkup(format), tools, opening=opening), pieces)


def cut(text: str, chance: random.Random) -> Iterator[str]:
    """Split the text into random pieces of 1 to 9 characters."""
    start = 0
    while start < len(text):
        end = start + chance.choice((1, 1, 2, 3, 5, 9))
        yield text[start:end]
        start = end


def tokens(rendered: str, markup: FormatMarkup) -> Iterator[str]:
    """Yield a rendered reply in pieces as a tokenizer would, without control tokens that are not part of the format."""
    for piece in _CONTROL.split(rendered.partition(_NEXT_TURN)[0]):
        if piece and (not _CONTROL.fullmatch(piece) or markup.may_contain(piece)):
            yield piece


def mutated(text: str, chance: random.Random) -> str:
    """Change the text at one to three positions: delete, truncate, swap, overwrite, insert, or repeat."""
    for _ in range(chance.randrange(1, 4)):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.choice((1, 1, 2, 5, 20)))
        before, part, after = text[:start], text[start:end], text[end:]
        other = chance.choice((*"{}[]\"'<>\\/|\n :,0é🙂\x00", "\\ud800", part))
        text = chance.choice(
            (before + after, before, after + part + before, before + other + after, before + part + other + after)
        )
    return text
