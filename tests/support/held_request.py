"""Requests whose KV blocks the test chooses, for tests without a scheduler."""

from dataclasses import dataclass, field

from engine.request import Request
from engine.step import ScheduledRequest


@dataclass(slots=True, eq=False)
class HeldRequest(Request):
    """A request with its own block table for each KV group."""

    block_tables: tuple[list[int], ...] = field(kw_only=True)

    @property
    def block_table(self) -> list[int]:
        """The block table of the first KV group."""
        return self.block_tables[0]

    def part(
        self, start: int, num_tokens: int, *, samples: bool = True, logprob_positions: range = range(0)
    ) -> ScheduledRequest:
        """Return a step's part of this request: `num_tokens` tokens from position `start`."""
        return ScheduledRequest(
            self, start, num_tokens, samples, block_tables=self.block_tables, logprob_positions=logprob_positions
        )

    def next_part(self, num_tokens: int) -> ScheduledRequest:
        """Return the part with the next `num_tokens` tokens. It samples if it contains the request's last token."""
        stop = self.num_computed + num_tokens
        return self.part(self.num_computed, num_tokens, samples=stop == self.num_tokens)
