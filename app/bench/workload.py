"""Workloads: loads, their prompts, and the rows of a table that are measured with them."""

import enum
import random
from dataclasses import dataclass

Prompts = tuple[tuple[int, ...], ...]  # one sequence of token ids per stream

_SEED = 20240229


class Rate(enum.Enum):
    """A figure in tokens per second."""

    PREFILL = enum.auto()  # tokens of a prompt, until the first token of its reply
    DECODE = enum.auto()  # tokens of the replies, counted while the largest number of streams decode together
    END_TO_END = enum.auto()  # tokens of the replies, from the arrival of the first prompt to the last token


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that start at the same time, each with a prompt and a reply of fixed length."""

    prompt_tokens: int
    output_tokens: int
    streams: int = 1
    rates: frozenset[Rate] = frozenset(Rate)  # the figures to measure

    @property
    def context(self) -> int:
        """Number of tokens of a stream when it ends."""
        return self.prompt_tokens + self.output_tokens

    def __str__(self) -> str:
        return f"{self.prompt_tokens} + {self.output_tokens} tokens, {counted(self.streams, 'stream')}"

    def prompts(self, turn: int, vocab_size: int) -> Prompts:
        """Return the prompts of one turn. They are the same for all competitors and all different, so that no cache
        helps.
        """
        return tuple(
            tuple(self._generator(turn, stream).choices(range(vocab_size), k=self.prompt_tokens))
            for stream in range(self.streams)
        )

    def _generator(self, turn: int, stream: int) -> random.Random:
        numbers = (_SEED, turn, self.prompt_tokens, self.output_tokens, self.streams, stream)
        return random.Random(repr(numbers))  # noqa: S311  # must be reproducible, not secret


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the report: one rate of a load, with its name in JSON and its title in the table."""

    name: str
    title: str
    load: Load
    rate: Rate


def rows_of(prompt_tokens: int, output_tokens: int, concurrency: int) -> tuple[Row, ...]:
    """Return the figures of one workload: those of a single stream, and those of all streams together."""
    together = frozenset({Rate.DECODE, Rate.END_TO_END})
    single = Load(prompt_tokens, output_tokens)
    crowd = single if concurrency == 1 else Load(prompt_tokens, output_tokens, concurrency, together)
    return (
        Row("prefill_tok_s", "prefill", single, Rate.PREFILL),
        Row("decode_tok_s", "decode, 1 stream", single, Rate.DECODE),
        Row("throughput_tok_s", f"decode, {counted(concurrency, 'stream')}", crowd, Rate.DECODE),
        Row("end_to_end_tok_s", f"end to end, {counted(concurrency, 'stream')}", crowd, Rate.END_TO_END),
    )


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _suite_row(name: str, title: str, load: tuple[int, int, int], rate: Rate) -> Row:
    return Row(name, title, Load(*load, frozenset({rate})), rate)


# Typical loads of an editor, a chat, and several agents. The fourth load has a context of about 2,000
# tokens, which fits in 2,048. Replies of 16 streams are long enough for all to decode together on a slow machine.
SUITE = (
    _suite_row("prefill_512", "prefill, 512 tokens", (512, 1, 1), Rate.PREFILL),
    _suite_row("decode_128", "decode, context 128", (128, 96, 1), Rate.DECODE),
    _suite_row("decode_4_streams", "decode, 4 streams, context 128", (128, 64, 4), Rate.DECODE),
    _suite_row("decode_2000", "decode, context 2,000", (1952, 96, 1), Rate.DECODE),
    _suite_row("decode_16_streams", "decode, 16 streams, context 60", (60, 64, 16), Rate.DECODE),
)


def loads_of(rows: tuple[Row, ...]) -> tuple[Load, ...]:
    """Return the distinct loads of the rows."""
    return tuple(dict.fromkeys(row.load for row in rows))
