"""Grammars that constrain replies, compiled for one vocabulary.

The sources are JSON schemas, regular expressions, choices, Lark, and GBNF grammars. Each is compiled in its own process
(`app.grammars`). Concurrent requests for the same grammar share one compilation, and results are cached for a while.
"""

import asyncio
import collections
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from app.errors import GrammarsUnavailable, InvalidGrammar
from app.generation.conversation import Json
from app.grammars.frames import WHITESPACE, GrammarLimits, GrammarText, Vocabulary
from app.grammars.host import GrammarProcess
from app.grammars.lark import literal
from app.grammars.process_streams import ProcessStarter
from app.text.tokenizer import Tokenizer
from engine.grammar import Grammar

MAX_SOURCE: Final = 1 << 18  # maximum length of a grammar's source in characters
MAX_DEPTH: Final = 64
MAX_CACHED: Final = 8  # maximum number of cached grammars, each of which is a process
CACHED_SECONDS: Final = 60.0
_MAX_PARALLEL: Final = 8  # maximum number of grammars that are compiled at the same time


@dataclass(frozen=True, slots=True)
class GrammarSource(GrammarText):
    """The source of a grammar."""

    @classmethod
    def schema(cls, schema: Json, *, lenient: bool = False, whitespace: str | None = WHITESPACE) -> "GrammarSource":
        """Return a grammar of the values that match a JSON schema. `lenient` allows keywords that cannot be enforced.

        Raises InvalidGrammar if the schema is nested too deeply or matches no value.
        """
        if schema is False:
            raise InvalidGrammar("No value matches it.")
        if _nesting(schema) > MAX_DEPTH:
            raise InvalidGrammar(f"It is nested deeper than {MAX_DEPTH} levels.")
        return cls("json", json.dumps({} if schema is True else schema, ensure_ascii=False), lenient, whitespace)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "GrammarSource":
        """Return a grammar that matches exactly one of `texts`."""
        return cls("lark", "start: " + " | ".join(map(literal, texts)))

    def as_lark(self) -> str:
        """Return the grammar as an expression that can be part of a larger Lark grammar."""
        if self.kind == "json":
            guidance = {**self.guidance(), "lenient": self.lenient}
            return f"%json {json.dumps({**json.loads(self.text), 'x-guidance': guidance}, ensure_ascii=False)}"
        if self.kind == "regex":
            return f"/{_SLASH_OR_LINE.sub(_written_in_slashes, self.text)}/"
        if self.kind == "gbnf":
            return f"%gbnf {json.dumps(self.text)}"
        return f"%lark {{\n{self.text}\n}}"


ANY_OBJECT: Final = GrammarSource("json", '{"type": "object"}')
# the first alternative skips characters that are already escaped
_SLASH_OR_LINE: Final = re.compile(r"\\.|/|\n", re.DOTALL)


def _written_in_slashes(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """A grammar, and the request field that it comes from."""

    source: GrammarSource
    field: str

    async def compile(self, compiler: "GrammarCompiler") -> Grammar:
        """Compile the grammar. Raises InvalidGrammar with a path in the request, and GrammarsUnavailable."""
        try:
            return await compiler.compile(self.source)
        except InvalidGrammar as error:
            raise error.within(self.field) from error


class GrammarCompiler:
    """Compiles and caches grammars for one vocabulary. Used on one event loop at a time."""

    def __init__(self, tokenizer: Tokenizer, starter: ProcessStarter | None = None) -> None:
        """`starter` replaces the default starter of grammar processes."""
        # Not a bound method, because a process must not keep its compiler alive.
        self._tokenize = partial(_tokenized, tokenizer)
        self._starter = starter or ProcessStarter(partial(vocabulary_of, tokenizer), GrammarLimits())
        # whether the vocabulary can encode forced tokens; if not, they are sampled one by one
        self._jumps = tokenizer.encode_continuation("a") is not None
        self._threads = ThreadPoolExecutor(_MAX_PARALLEL, "grammars")
        self._cache: collections.OrderedDict[GrammarText, tuple[GrammarProcess, float]] = collections.OrderedDict()
        self._compilations: dict[GrammarText, _Compilation] = {}
        self._is_closed = False
        weakref.finalize(self, self._starter.close)

    async def prepare(self) -> None:
        """Start a process and build the vocabulary, so that the first grammar does not wait for it.

        Building takes 0.25 s for 50,000 tokens and 2 s for 260,000. Raises InvalidGrammar if the model supports no
        grammars, and GrammarsUnavailable.
        """
        await asyncio.wrap_future(self._threads.submit(self._starter.prepare))

    async def compile(self, source: GrammarText) -> Grammar:
        """Return the compiled grammar.

        Raises InvalidGrammar with the path of the part at fault, and GrammarsUnavailable.
        """
        process = self._cached(source)
        if process is None:
            if len(source.text) > MAX_SOURCE:
                raise InvalidGrammar(f"It has {len(source.text):,} characters; the limit is {MAX_SOURCE:,}.")
            process = await self._compiled(source)
        self._cache[source] = process, time.monotonic()
        self._cache.move_to_end(source)
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        # Weak, because otherwise the timer would keep the compiler of an unloaded model, and thus its tokenizer.
        asyncio.get_running_loop().call_later(CACHED_SECONDS, _call, weakref.WeakMethod(self._expire))
        return process

    async def close(self) -> None:
        """End all grammar processes, and refuse waiting compilations. Waits for a process that is starting.

        No reply may use a grammar any more.
        """
        self._is_closed = True
        self._cache.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._starter.close)

    def _cached(self, source: GrammarText) -> GrammarProcess | None:
        process, _ = self._cache.get(source, (None, 0.0))
        return process if process is not None and process.is_alive else None

    async def _compiled(self, source: GrammarText) -> GrammarProcess:
        """Compile `source`, or wait for a compilation in progress.

        The compilation is stopped when the last request that waits for it is canceled.
        """
        if self._is_closed:
            raise _closed()
        compilation = self._compilations.get(source)
        if compilation is None:
            compilation = self._compilations[source] = _Compilation(self._new_process, source, self._threads)
        compilation.waiting += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(compilation.process))
        except asyncio.CancelledError:
            if self._is_closed and compilation.process.cancelled():
                raise _closed() from None
            raise
        finally:
            compilation.waiting -= 1
            if not compilation.waiting:
                del self._compilations[source]
                compilation.stop()

    def _expire(self) -> None:
        """Drop cached grammars that were not used for CACHED_SECONDS."""
        oldest = time.monotonic() - CACHED_SECONDS
        for source in [source for source, (_, used) in self._cache.items() if used <= oldest]:
            del self._cache[source]

    def _new_process(self) -> GrammarProcess:
        return GrammarProcess(self._starter.start(), self._tokenize, self._starter.limits, jumps=self._jumps)


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the tokenizer's vocabulary. Raises InvalidGrammar if it has no token that ends a reply."""
    ends = sorted(tokenizer.end_of_generation_ids)
    if not ends:
        raise InvalidGrammar("The model's vocabulary has no token that ends a reply, which grammars require.")
    tokens = [tokenizer.token_bytes(token_id, show_control=True) for token_id in range(tokenizer.vocab_size)]
    return Vocabulary(tokens, sorted(tokenizer.control_tokens.values()), ends, tokenizer.bos_id)


def _closed() -> GrammarsUnavailable:
    return GrammarsUnavailable("The model is being unloaded", "Try again.")


def _call(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    if (bound := method()) is not None:
        bound()


def _tokenized(tokenizer: Tokenizer, text: bytes) -> Sequence[int]:
    return tokenizer.encode_continuation(text.decode()) or ()


class _Compilation:
    """A compilation in progress, shared by the requests that wait for it."""

    def __init__(self, start: Callable[[], GrammarProcess], source: GrammarText, threads: ThreadPoolExecutor) -> None:
        self.waiting = 0
        self._start = start
        self._source = source
        self._lock = threading.Lock()
        self._started: GrammarProcess | None = None
        self._is_stopped = False
        self.process: Future[GrammarProcess] = threads.submit(self._compile)

    def stop(self) -> None:
        """Stop the compilation, unless it has finished."""
        self.process.cancel()
        with self._lock:
            self._is_stopped = True
            if self._started is not None and not self.process.done():
                self._started.end()

    def _compile(self) -> GrammarProcess:
        try:
            return self._attempt()
        except GrammarsUnavailable:
            if self._is_stopped:
                raise
            # The first process, which forks the others, may have died and been restarted, so try once more.
            return self._attempt()

    def _attempt(self) -> GrammarProcess:
        process = self._start()
        with self._lock:
            if self._is_stopped:
                process.end()
            self._started = process
        process.compile(self._source)
        return process


def _nesting(value: Json) -> int:
    """Return the nesting depth of objects and lists."""
    level, depth = [value], 0
    while level:
        members = [list(it.values()) if isinstance(it, Mapping) else it for it in level if _is_container(it)]
        level = [member for several in members if isinstance(several, Sequence) for member in several]
        depth += 1
    return depth


def _is_container(value: Json) -> bool:
    return isinstance(value, Mapping | Sequence) and not isinstance(value, str)
