"""Requests with KV blocks that tests choose, without a scheduler."""

from dataclasses import dataclass, field

from engine.request import Request
from engine.step import ScheduledRequest


@dataclass(slots=True, eq=False)
class HeldRequest(Request):
    """A request with a block table for each KV group."""

    block_tables: tuple[list[int], ...] = field(kw_only=True)

    @property
    def block_table(self) -> list[int]:
        """The block table of the first KV group."""
        return self.block_tables[0]

    def part(
        self, start: int, num_tokens: int, *, samples: bool = True, logprob_positions: range = range(0)
    ) -> ScheduledRequest:
        """Return its part in a step: the tokens start .. start + num_tokens."""
        return ScheduledRequest(
            self, start, num_tokens, samples, block_tables=self.block_tables, logprob_positions=logprob_positions
        )

    def next_part(self, num_tokens: int) -> ScheduledRequest:
        """Return the part with its next tokens. It samples if the part reaches the last token."""
        stop = self.num_computed + num_tokens
        return self.part(self.num_computed, num_tokens, samples=stop == self.num_tokens)
