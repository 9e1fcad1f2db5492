"""The way of a request to the engine: what is prepared for it, and whether requests get stuck on the way."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from app.generation.options import GenerationOptions
from app.generation.reply_formats.reply_parser import ReplyParser
from engine.request import SamplingParams

STUCK_SECONDS = 60.0  # without a request that is prepared, or given up, while some are waiting


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """Prompts as token ids, and how the replies to them are generated and read."""

    prompts: Sequence[tuple[int, ...]]
    options: GenerationOptions  # with the compiled grammar in its candidates
    grammar_field: str = ""  # of the request, that errors about the grammar name
    new_parser: Callable[[], ReplyParser] | None = None  # for each reply; None: all of a reply is text
    continues_text: bool = True  # the reply goes on in the middle of a text, not as a turn

    def submissions(self) -> list[tuple[tuple[int, ...], SamplingParams]]:
        """Each prompt with the parameters of one candidate. Raises PromptTooLong."""
        return [(prompt, params) for prompt in self.prompts for params in self.options.after(prompt)]


class Preparation:
    """Counts the requests that wait for their prompt and grammar. Used on one event loop; `problem` is thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds that only grow."""
        self._clock = clock
        self._waiting = 0
        self._moved_at = clock()

    @contextlib.contextmanager
    def of_request(self) -> Iterator[None]:
        """Count a request as waiting while the body runs."""
        if not self._waiting:
            self._moved_at = self._clock()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._moved_at = self._clock()

    def problem(self) -> str:
        """Why requests wait in vain, or an empty string while they get on."""
        silence = self._clock() - self._moved_at if self._waiting else 0.0
        return f"no request was prepared for the engine for {silence:.0f} s" if silence >= STUCK_SECONDS else ""
