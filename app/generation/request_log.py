"""Request log: one line per request with its token counts, sources, and times, never with its text.

Further lines report the progress of long prefills. The log has its own logger, so that it can be shown without the log
lines of libraries.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Protocol

from app.generation.cache_report import Miss, MissReason
from app.generation.events import ChatEvent, PromptProgress, TokenCounts
from app.generation.recent_replies import RecentReplies
from engine.request import Origin
from tui.figures import share

log = logging.getLogger(__name__)


class OnEnd(Protocol):
    """Receives the counts of a request when its replies have ended."""

    def __call__(self, counts: TokenCounts, *, failed: bool) -> None: ...


ON_END: ContextVar[OnEnd | None] = ContextVar("ON_END", default=None)

_MAX_UNWRITTEN = 1000  # limit of the lines in the queue, beyond which lines are dropped
_END_SECONDS = 1.0  # seconds to wait until the last lines are written
LONG_PROMPT = 4096  # number of uncached tokens from which the start of a prefill is logged
PREFILL_LOG_SECONDS = 10.0  # seconds between two lines about a prompt

_REASONS = {
    MissReason.FIRST_TIME: "no similar prompt before",
    MissReason.DIVERGED: "diverged at token {position}",
    MissReason.REMOVED: "a part was removed at token {position}",
    MissReason.EVICTED: "evicted from token {position} on",
    MissReason.RECOMPUTED: "recomputed from token {position} on, which is faster than reading its blocks",
    MissReason.PROMPT_LOGPROBS: "computed completely for its logprobs",
}


class PrefillLog:
    """Logs the prefill progress of one request."""

    def __init__(self, who: str) -> None:
        self._who = who
        # keys: indexes of replies; values: `seconds` of the last progress event that was logged
        self._logged_at: dict[int, float] = {}

    def log_progress(self, reply: int, event: ChatEvent) -> None:
        """Log the start of a long prefill, and the progress of any prefill every PREFILL_LOG_SECONDS."""
        if not isinstance(event, PromptProgress):
            return
        is_long = event.total - event.cached >= LONG_PROMPT
        logged_at = self._logged_at.get(reply, -PREFILL_LOG_SECONDS if is_long else 0.0)
        if event.seconds - logged_at >= PREFILL_LOG_SECONDS and event.done < event.total:
            self._logged_at[reply] = event.seconds
            log.info("%s; prefill: %s", self._who, _progress(event))


def _progress(progress: PromptProgress) -> str:
    """Format the progress, as in `7,693 of 21,979 tokens (35 %), about 3 min left`."""
    done, total = progress.done, progress.total
    rate = (done - progress.cached) / progress.seconds if progress.seconds > 0 else 0.0
    left = f", about {_duration((total - done) / rate)} left" if rate > 0 else ""
    return f"{done:,} of {total:,} tokens ({share(done / total)}){left}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@contextlib.contextmanager
def log_request(
    model: str, origin: Origin, counts: TokenCounts, recent: RecentReplies | None = None
) -> Iterator[PrefillLog]:
    """Log one line about the request when the body ends, however it ends, and add it to the `recent` replies."""
    who = f"{_one_line(model)} {origin.service.name.lower()}"
    outcome = "ended by the client"
    try:
        yield PrefillLog(who)
        outcome = ""
    except Exception as error:
        outcome = type(error).__name__
        raise
    finally:
        if recent is not None:
            recent.add(model, origin, counts, outcome)
        if log.isEnabledFor(logging.INFO):
            log.info("; ".join((who, *_of_prompt(counts), *_of_reply(counts), *([outcome] if outcome else []))))
        if (on_end := ON_END.get()) is not None:
            on_end(counts, failed=bool(outcome))


def _of_prompt(counts: TokenCounts) -> Iterator[str]:
    cache = counts.cache
    if not counts.replies:
        yield f"prompt {counts.prompt_total}"
        return
    sources = cache.sources
    found = f"{sources.device} device, {sources.host} RAM, {sources.disk} disk"
    yield f"prompt {counts.prompt}: {found}, {sources.computed} computed"
    if sources.host + sources.disk:
        yield f"restored in {sources.restore_seconds * 1000:.1f} ms"
    if cache.miss is not None:
        yield describe_miss(cache.miss)
    if cache.left_out:
        yield f"left out: {', '.join(cache.left_out)}"


def _of_reply(counts: TokenCounts) -> Iterator[str]:
    if not counts.replies:
        return
    yield f"first token after {counts.first_token_seconds * 1000:.0f} ms"
    # The first token of each reply counts toward the time before it.
    tokens, seconds = counts.completion - counts.replies, counts.total_seconds - counts.first_token_seconds
    rate = f" at {tokens / seconds:.1f}/s" if tokens > 0 and seconds > 0 else ""
    yield f"{counts.completion} tokens{rate}"


def describe_miss(miss: Miss) -> str:
    """Return the reason of a miss, without text of the conversation."""
    return _REASONS[miss.reason].format(position=miss.position)


def _one_line(name: str) -> str:
    return " ".join("".join(character if character.isprintable() else " " for character in name).split())


@contextlib.contextmanager
def write_request_log(say: Callable[[str], None], file: logging.Handler | None = None) -> Iterator[None]:
    """Pass each log line to the handler of a file and to `say` while the body runs.

    Both are called on another thread, so that slow output delays no request.
    """
    unwritten: queue.Queue[logging.LogRecord | None] = queue.Queue(_MAX_UNWRITTEN)
    handler, level, propagate = _Unwritten(unwritten), log.level, log.propagate
    writer = threading.Thread(target=_write, args=(unwritten, say, file), name="request log", daemon=True)
    writer.start()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
        with contextlib.suppress(queue.Full):
            unwritten.put_nowait(None)
            writer.join(_END_SECONDS)


class _Unwritten(logging.Handler):
    """Puts lines into a queue, and drops them if it is full."""

    def __init__(self, lines: "queue.Queue[logging.LogRecord | None]") -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(record)


def _write(
    lines: "queue.Queue[logging.LogRecord | None]", say: Callable[[str], None], file: logging.Handler | None
) -> None:
    form = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    while (line := lines.get()) is not None:
        if file is not None:
            file.handle(line)
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            say(form.format(line))
