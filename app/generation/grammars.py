"""Grammars: what a reply must be like, compiled for one vocabulary.

JSON schemas, regular expressions, choices, Lark and GBNF grammars come in as texts. Each is compiled in a process of
its own (`app.grammars`), once for all requests that ask for it at the same time, and is kept for a while.
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

MAX_SOURCE: Final = 1 << 18  # characters
MAX_DEPTH: Final = 64
MAX_CACHED: Final = 8  # grammars that no reply follows at the moment; each is a process
CACHED_SECONDS: Final = 60.0
_MAX_PARALLEL: Final = 8  # grammars that are compiled at the same time


@dataclass(frozen=True, slots=True)
class GrammarSource(GrammarText):
    """A grammar as a request asks for it."""

    @classmethod
    def schema(cls, schema: Json, *, lenient: bool = False, whitespace: str | None = WHITESPACE) -> "GrammarSource":
        """A value that fits a JSON schema. A lenient one may have keywords that cannot be enforced.

        Raises InvalidGrammar if it is nested too deeply, or no value fits.
        """
        if schema is False:
            raise InvalidGrammar("No value fits it.")
        if _nesting(schema) > MAX_DEPTH:
            raise InvalidGrammar(f"It is nested deeper than {MAX_DEPTH} levels.")
        return cls("json", json.dumps({} if schema is True else schema, ensure_ascii=False), lenient, whitespace)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "GrammarSource":
        """One of some texts."""
        return cls("lark", "start: " + " | ".join(map(literal, texts)))

    def as_lark(self) -> str:
        """The same as one expression of a larger Lark grammar."""
        if self.kind == "json":
            guidance = {**self.guidance(), "lenient": self.lenient}
            return f"%json {json.dumps({**json.loads(self.text), 'x-guidance': guidance}, ensure_ascii=False)}"
        if self.kind == "regex":
            return f"/{_SLASH_OR_LINE.sub(_written_in_slashes, self.text)}/"
        if self.kind == "gbnf":
            return f"%gbnf {json.dumps(self.text)}"
        return f"%lark {{\n{self.text}\n}}"


ANY_OBJECT: Final = GrammarSource("json", '{"type": "object"}')
_SLASH_OR_LINE: Final = re.compile(r"\\.|/|\n", re.DOTALL)  # what is escaped already is found first


def _written_in_slashes(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """A grammar, and the field of the request that asks for it."""

    source: GrammarSource
    field: str

    async def compile(self, compiler: "GrammarCompiler") -> Grammar:
        """Raises InvalidGrammar, which names the place in the request, and GrammarsUnavailable."""
        try:
            return await compiler.compile(self.source)
        except InvalidGrammar as error:
            raise error.within(self.field) from error


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Used on one event loop at a time."""

    def __init__(self, tokenizer: Tokenizer, starter: ProcessStarter | None = None) -> None:
        """`starter` starts other processes than this system's usual ones."""
        self._tokenize = partial(_tokenized, tokenizer)  # not a method: processes must not hold their compiler
        self._starter = starter or ProcessStarter(partial(vocabulary_of, tokenizer), GrammarLimits())
        self._jumps = tokenizer.encode_continuation("a") is not None  # else what must follow is drawn token by token
        self._threads = ThreadPoolExecutor(_MAX_PARALLEL, "grammars")
        self._cache: collections.OrderedDict[GrammarText, tuple[GrammarProcess, float]] = collections.OrderedDict()
        self._compilations: dict[GrammarText, _Compilation] = {}
        weakref.finalize(self, self._starter.close)

    async def prepare(self) -> None:
        """Do now what the first grammar would wait for: start a process and have it build the vocabulary, which takes
        it a quarter of a second for 50,000 tokens and two for 260,000.

        Raises InvalidGrammar for a model that no grammar can be compiled for, and GrammarsUnavailable.
        """
        await asyncio.wrap_future(self._threads.submit(self._starter.prepare))

    async def compile(self, source: GrammarText) -> Grammar:
        """Raises InvalidGrammar, which names the place of a schema that is at fault, and GrammarsUnavailable."""
        process = self._cached(source)
        if process is None:
            if len(source.text) > MAX_SOURCE:
                raise InvalidGrammar(f"It has {len(source.text):,} characters; at most {MAX_SOURCE:,} are compiled.")
            process = await self._compiled(source)
        self._cache[source] = process, time.monotonic()
        self._cache.move_to_end(source)
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        asyncio.get_running_loop().call_later(CACHED_SECONDS, self._expire)
        return process

    def _cached(self, source: GrammarText) -> GrammarProcess | None:
        process, _ = self._cache.get(source, (None, 0.0))
        return process if process is not None and process.is_alive else None

    async def _compiled(self, source: GrammarText) -> GrammarProcess:
        """The same process for all who wait for it. Compiling ends when nobody waits any more."""
        compilation = self._compilations.get(source)
        if compilation is None:
            compilation = self._compilations[source] = _Compilation(self._new_process, source, self._threads)
        compilation.waiting += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(compilation.process))
        finally:
            compilation.waiting -= 1
            if not compilation.waiting:
                del self._compilations[source]
                compilation.stop()

    def _expire(self) -> None:
        """Let go of grammars that nobody has asked for lately."""
        oldest = time.monotonic() - CACHED_SECONDS
        for source in [source for source, (_, used) in self._cache.items() if used <= oldest]:
            del self._cache[source]

    def _new_process(self) -> GrammarProcess:
        return GrammarProcess(self._starter.start(), self._tokenize, self._starter.limits, jumps=self._jumps)


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Raises InvalidGrammar for a model without a token that ends a reply."""
    ends = sorted(tokenizer.end_of_generation_ids)
    if not ends:
        raise InvalidGrammar("The model's vocabulary has no token that ends a reply, so no reply can follow a grammar.")
    tokens = [tokenizer.token_bytes(token_id, show_control=True) for token_id in range(tokenizer.vocab_size)]
    return Vocabulary(tokens, sorted(tokenizer.control_tokens.values()), ends, tokenizer.bos_id)


def _tokenized(tokenizer: Tokenizer, text: bytes) -> Sequence[int]:
    return tokenizer.encode_continuation(text.decode()) or ()


class _Compilation:
    """A grammar that is being compiled, and how many requests wait for it."""

    def __init__(self, start: Callable[[], GrammarProcess], source: GrammarText, threads: ThreadPoolExecutor) -> None:
        self.waiting = 0
        self._start = start
        self._source = source
        self._lock = threading.Lock()
        self._started: GrammarProcess | None = None
        self._is_stopped = False
        self.process: Future[GrammarProcess] = threads.submit(self._compile)

    def stop(self) -> None:
        """End it, unless it is compiled."""
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
            return self._attempt()  # the process that starts the others may have died: there is another now

    def _attempt(self) -> GrammarProcess:
        process = self._start()
        with self._lock:
            if self._is_stopped:
                process.end()
            self._started = process
        process.compile(self._source)
        return process


def _nesting(value: Json) -> int:
    """How deeply objects and lists are nested."""
    level, depth = [value], 0
    while level:
        members = [list(it.values()) if isinstance(it, Mapping) else it for it in level if _is_container(it)]
        level = [member for several in members if isinstance(several, Sequence) for member in several]
        depth += 1
    return depth


def _is_container(value: Json) -> bool:
    return isinstance(value, Mapping | Sequence) and not isinstance(value, str)
