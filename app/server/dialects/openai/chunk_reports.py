"""Reports beside the text of a stream, in the chunks of both kinds of completions: token ids, usage, and timings."""

from app.generation.events import ChatEvent, GeneratedTokens, TokenCounts
from app.server.dialects.openai.chat import ChatCompletionChunk
from app.server.dialects.openai.completions import Completion
from app.server.dialects.openai.reporting import ReportingRequest
from app.server.dialects.openai.tokens import usage_of, usage_so_far
from app.server.usage import RunningCounts, timings_of


class ChunkReports:
    """Collects what one request reports, and adds it to the request's chunks."""

    def __init__(self, wanted: ReportingRequest, counts: TokenCounts) -> None:
        """`counts` is added up elsewhere, while the replies end."""
        self._wanted = wanted
        self._counts = counts
        self._running = RunningCounts()
        self._ids: dict[int, list[int]] = {}  # of each choice, those that no chunk has reported

    def see(self, index: int, event: ChatEvent) -> None:
        """Count an event of the choice at `index`."""
        self._running.add(event)
        if isinstance(event, GeneratedTokens) and self._wanted.return_token_ids:
            self._ids.setdefault(index, []).extend(event.ids)

    def add(self, chunk: ChatCompletionChunk | Completion) -> None:
        """Add the reports that the request asks for to a chunk with choices."""
        if self._wanted.return_token_ids:
            for choice in chunk.choices:
                choice.token_ids = self._ids.pop(choice.index, [])
        if self._wanted.reports_usage_continuously:
            chunk.usage = usage_so_far(self._counts, self._running)
        if self._wanted.timings_per_token:
            chunk.timings = self._running.timings()

    def end(self, chunk: ChatCompletionChunk | Completion) -> None:
        """Add the usage and the timings of all replies to the last chunk, after they have ended."""
        chunk.usage, chunk.timings = usage_of(self._counts), timings_of(self._counts)
