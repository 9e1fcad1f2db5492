"""Grammar processes: one grammar never delays others, and limits are enforced."""

import asyncio
import gc
import os
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from app.errors import GrammarsUnavailable, InvalidGrammar
from app.generation.grammars import GrammarCompiler, GrammarSource, vocabulary_of
from app.grammars.frames import Channel, ConnectionLost, Frame, GrammarLimits, Kind, Vocabulary
from app.grammars.host import GrammarFailed, GrammarProcess
from app.grammars.process_streams import ProcessStarter, ProcessStream, SocketStream
from app.text.tokenizer import Tokenizer
from engine.grammar import Constraint, Grammar
from engine.request import Request
from engine.sampling.masks import MaskThread, next_position
from engine.sampling_params import SamplingParams
from engine.step import ScheduledRequest
from tests.support.processes import HANGING_SECONDS, until

FAST = GrammarSource("regex", "[a-z]{1,5}")
# The parser takes minutes for one position, because each rule may start and end with any other rule.
_WIDE = "wide: " + " | ".join(f"r{number}" for number in range(1000))
_RULES = "\n".join(f'r{number}: wide? "y" wide?' for number in range(1000))
SLOW = GrammarSource("lark", f'start: "a" wide\n{_WIDE}\n{_RULES}')
# The same slow rules after a long text, which the compiler's trial never completes.
SLOW_LATER = GrammarSource("lark", f'start: /[A-Z ]{{3000}}/ "q" wide\n{_WIDE}\n{_RULES}')


class CountingStarter(ProcessStarter):
    """A starter that records the streams of its processes."""

    def __init__(self, tokenizer: Tokenizer, limits: GrammarLimits | None = None, *, forks: bool = True) -> None:
        super().__init__(
            lambda: vocabulary_of(tokenizer), limits or GrammarLimits(compile_wall_seconds=HANGING_SECONDS), forks=forks
        )
        self.lines: list[ProcessStream] = []
        self.began = threading.Event()

    def start(self) -> ProcessStream:
        line = super().start()
        self.lines.append(line)
        self.began.set()
        return line

    @property
    def first_pid(self) -> int:
        assert self._first is not None
        return self._first[0].pid

    def children(self) -> int:
        """The number of forked processes."""
        told = subprocess.run(["ps", "-A", "-o", "ppid=,stat="], capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in told.splitlines()]
        return sum(row[0] == str(self.first_pid) and not row[1].startswith("Z") for row in rows)


@pytest.fixture
def make_compiler(tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[GrammarCompiler, CountingStarter]]]:
    """Return a function that creates a compiler with limits. Ends its processes after the test."""
    starters: list[CountingStarter] = []

    def make(limits: GrammarLimits | None = None, *, forks: bool = True) -> tuple[GrammarCompiler, CountingStarter]:
        starters.append(CountingStarter(tokenizer, limits, forks=forks))
        return GrammarCompiler(tokenizer, starters[-1]), starters[-1]

    yield make
    for starter in starters:
        for line in starter.lines:
            line.end()
        starter.close()


def test_ended_stream_keeps_its_descriptor_until_closed() -> None:
    ours, theirs = socket.socketpair()
    line = SocketStream(ours)
    with theirs:
        line.end()
        other, also = socket.socketpair()  # these sockets get the lowest free descriptors
        with other, also:
            assert ours.fileno() not in (-1, other.fileno(), also.fileno())
            assert (line.receive(1), theirs.recv(1)) == (b"", b"")
    line.close()
    assert ours.fileno() == -1


def allowed(constraint: Constraint, tokenizer: Tokenizer) -> list[int]:
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    assert constraint.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def longest_reply_length(grammar: Grammar, tokenizer: Tokenizer, most: int = 400) -> int:
    """Return the number of tokens in a reply that always takes the longest allowed token."""
    constraint, count = grammar.start(jumps=True), 0
    while not constraint.ended and count < most:
        best = max(allowed(constraint, tokenizer), key=lambda one: len(tokenizer.token_bytes(one)))
        count += 1 + len(constraint.accept(best))
    return count


def test_slow_grammar_delays_no_other(
    make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]],
) -> None:
    compiler, starter = make_compiler(GrammarLimits(compile_cpu_seconds=600, compile_wall_seconds=600))

    async def main() -> None:
        slow = asyncio.create_task(compiler.compile(SLOW))
        await asyncio.to_thread(starter.began.wait)
        for number in range(20):
            await compiler.compile(GrammarSource("regex", f"a{{{number + 1}}}"))
        assert not slow.done()
        slow.cancel()

    asyncio.run(asyncio.wait_for(main(), HANGING_SECONDS))


def test_time_of_compilations_is_limited(
    make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]],
) -> None:
    compiler, _ = make_compiler(GrammarLimits(compile_cpu_seconds=600, compile_wall_seconds=0.5))
    with pytest.raises(InvalidGrammar, match=r"compiling it takes more than 0\.5 seconds"):
        asyncio.run(asyncio.wait_for(compiler.compile(SLOW), HANGING_SECONDS))


def test_cpu_time_is_limited(make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]]) -> None:
    compiler, _ = make_compiler(GrammarLimits(compile_cpu_seconds=0.2, compile_wall_seconds=600))
    with pytest.raises(InvalidGrammar, match="compiling it takes more than 600 seconds"):
        asyncio.run(asyncio.wait_for(compiler.compile(SLOW), HANGING_SECONDS))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_grammar_processes_ignore_terminal_signals(
    make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]], number: signal.Signals
) -> None:
    compiler, starter = make_compiler()
    asyncio.run(compiler.compile(FAST))
    os.kill(starter.first_pid, number)
    asyncio.run(asyncio.wait_for(compiler.compile(GrammarSource("regex", "[a-z]{2}")), HANGING_SECONDS))
    assert len(starter.lines) == 2


def test_memory_is_limited(make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]]) -> None:
    large = GrammarSource("regex", "a{99999}")
    limits = GrammarLimits(compile_cpu_seconds=600, compile_wall_seconds=600, mask_cpu_seconds=600)
    roomy, _ = make_compiler(limits)
    asyncio.run(roomy.compile(large))
    narrow, _ = make_compiler(replace(limits, memory_bytes=24 << 20))
    with pytest.raises(InvalidGrammar, match="24 MB"):
        asyncio.run(asyncio.wait_for(narrow.compile(large), HANGING_SECONDS))
    asyncio.run(narrow.compile(FAST))


def test_concurrent_requests_share_a_compilation(
    make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]],
) -> None:
    compiler, starter = make_compiler()

    async def main() -> list[Grammar]:
        return await asyncio.gather(*(compiler.compile(GrammarSource("regex", "[a-z]{1,5}")) for _ in range(10)))

    assert len(set(map(id, asyncio.run(main())))) == 1
    assert len(starter.lines) == 1


def test_compilation_stops_when_the_last_request_leaves(
    make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]],
) -> None:
    compiler, starter = make_compiler(GrammarLimits(compile_cpu_seconds=600, compile_wall_seconds=600))

    async def main() -> None:
        waiting = [asyncio.create_task(compiler.compile(SLOW)) for _ in range(3)]
        await asyncio.to_thread(starter.began.wait)
        await asyncio.to_thread(until, lambda: starter.children() == 1)
        for task in waiting[:2]:
            task.cancel()
            await asyncio.wait((task,))
        await asyncio.sleep(0.1)
        assert starter.children() == 1
        assert not waiting[2].done()
        waiting[2].cancel()
        await asyncio.to_thread(until, lambda: starter.children() == 0)
        await compiler.compile(FAST)
        again = asyncio.create_task(compiler.compile(SLOW))  # this request starts a new compilation
        await asyncio.to_thread(until, lambda: starter.children() == 2)
        again.cancel()

    asyncio.run(asyncio.wait_for(main(), HANGING_SECONDS))
    assert len(starter.lines) == 3


def test_slow_mask_ends_only_its_own_reply(
    tokenizer: Tokenizer, make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]]
) -> None:
    compiler, starter = make_compiler(GrammarLimits(compile_wall_seconds=600, burst_cpu_seconds=600))
    slow, fast = asyncio.run(compiler.compile(SLOW_LATER)), asyncio.run(compiler.compile(FAST))
    requests = [Request(number, (1,), SamplingParams()) for number in range(3)]
    for request, grammar in zip(requests, (slow, fast, slow), strict=True):
        request.constraint = grammar.start(jumps=True)
    masks, steps = MaskThread(tokenizer.vocab_size), 0
    while True:
        under_way = masks.start([ScheduledRequest(it, 0, 1, samples=True) for it in requests])
        assert under_way is not None
        found = under_way.result(HANGING_SECONDS)
        assert 1 not in found.problems
        if found.problems:
            break
        steps += 1
        for request in (requests[0], requests[2]):
            few = np.flatnonzero(found.allowed_rows([next_position(request)], tokenizer.vocab_size)[0])
            best = max(few.tolist(), key=lambda one: len(tokenizer.token_bytes(one)))
            assert request.constraint is not None
            request.constraint.accept(best)
    assert steps > 8
    assert "it exceeded its limits of time and memory" in next(iter(found.problems.values()))
    assert not slow.is_alive  # type: ignore[attr-defined]
    assert longest_reply_length(fast, tokenizer)
    until(lambda: starter.children() == 1)
    assert asyncio.run(compiler.compile(SLOW_LATER)) is not slow


def test_forced_tokens_are_tokenized_during_other_requests(
    tokenizer: Tokenizer, make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]]
) -> None:
    """The process requests token ids while it gets requests about other replies."""
    compiler, _ = make_compiler()
    grammar = asyncio.run(compiler.compile(GrammarSource("regex", "[ab] and a fixed text that follows.")))
    [first] = tokenizer.encode("a")
    replies = [grammar.start(jumps=True) for _ in range(8)]
    for reply in replies:
        reply.prefetch_accept([first])
    forced = {tuple(reply.accept(first)) for reply in replies}
    assert len(forced) == 1
    assert tokenizer.decode(forced.pop(), continues_text=True).startswith(" and a fixed")


def test_masks_that_are_slow_on_average_end_a_reply(
    tokenizer: Tokenizer, make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]]
) -> None:
    limits = GrammarLimits(compile_wall_seconds=600, burst_cpu_seconds=0.0, mean_cpu_seconds=0.0)
    compiler, _ = make_compiler(limits)
    grammar = asyncio.run(compiler.compile(GrammarSource("regex", "([a-z]+ ?){1,1000}end")))
    with pytest.raises(GrammarFailed, match="ms on average"):
        longest_reply_length(grammar, tokenizer)
    constraint = grammar.start(jumps=True)
    assert constraint.accept(5) == ()
    with pytest.raises(GrammarFailed, match="too complex"):
        constraint.fill(np.zeros(2000, np.int32))


def test_dead_end_of_a_grammar_ends_the_reply(
    tokenizer: Tokenizer, make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]]
) -> None:
    compiler, _ = make_compiler()
    grammar = asyncio.run(compiler.compile(GrammarSource("lark", 'start: "x" A | "y"\nA: /[a-z]/ & /[0-9]/')))
    constraint = grammar.start(jumps=False)
    (x,) = tokenizer.encode_plain("x", at_start=False)
    constraint.accept(x)
    with pytest.raises(GrammarFailed, match="No text matches"):
        allowed(constraint, tokenizer)
    other = grammar.start(jumps=False)
    assert x in allowed(other, tokenizer)  # other replies with the grammar are unaffected


OBJECTS = GrammarSource.schema(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 5}, "size": {"type": "integer", "maximum": 99}},
            "required": ["name", "size"],
            "additionalProperties": False,
        },
        "minItems": 3,
    }
)
SECONDS = 60.0  # time for the masks of a draft; enough for any number


@pytest.mark.parametrize("jumps", [False, True])
def test_masks_of_a_draft_are_those_after_its_tokens(
    tokenizer: Tokenizer, make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]], jumps: bool
) -> None:
    """A right draft is divided at the tokens that are not forced, up to the end of the reply."""
    compiler, _ = make_compiler()
    grammar, rng = asyncio.run(compiler.compile(OBJECTS)), random.Random(jumps)
    reply = grammar.start(jumps=jumps)
    masks, runs = [], list[list[int]]()  # before each token that is not forced
    while not reply.ended and len(runs) < 40:
        masks.append(allowed(reply, tokenizer))
        token_id = rng.choice(masks[-1])
        runs.append([token_id, *reply.accept(token_id)])
    if not reply.ended:
        masks.append(allowed(reply, tokenizer))
    reply, words = grammar.start(jumps=jumps), np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    for index, run in enumerate(runs):
        drafted = [token_id for later in runs[index:] for token_id in later][:12]
        lengths = list(reply.look_ahead(drafted, SECONDS))
        assert lengths == [len(it) for it in runs[index : index + len(lengths)]]
        assert lengths or len(run) > 12 or index == len(runs) - 1
        for count in rng.sample(range(len(lengths) + 1), len(lengths) + 1):
            assert reply.fill(words, count)
            assert (
                np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist() == masks[index + count]
            )
        assert [run[0], *reply.accept(run[0])] == run


def test_draft_ends_at_a_token_that_is_not_allowed(
    tokenizer: Tokenizer, make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]]
) -> None:
    compiler, _ = make_compiler()
    reply = asyncio.run(compiler.compile(GrammarSource("regex", "[0-9]{1,6} and no more"))).start(jumps=True)
    digits = [tokenizer.encode_plain(digit, at_start=False)[0] for digit in "12345"]
    (letter,) = tokenizer.encode_plain("x", at_start=False)
    blank, *rest = tokenizer.encode_plain(" and no more", at_start=False)
    assert list(reply.look_ahead([*digits, letter, digits[0]], SECONDS)) == [1] * 5
    assert list(reply.look_ahead([letter], SECONDS)) == []
    assert list(reply.look_ahead([*digits[:2], blank, letter], SECONDS)) == [1, 1]  # another token is forced
    assert list(reply.look_ahead([*digits[:2], blank, *rest], SECONDS)) == [1, 1]  # the last run ends the reply
    assert reply.accept(digits[0]) == ()
    assert digits[1] in allowed(reply, tokenizer)


def test_drafts_are_short_if_masks_are_slow(
    tokenizer: Tokenizer, make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]]
) -> None:
    compiler, _ = make_compiler()
    grammar = asyncio.run(compiler.compile(GrammarSource("regex", "[0-9]{20}")))
    assert isinstance(grammar, GrammarProcess)
    reply, digits = grammar.start(jumps=True), tokenizer.encode_plain("0123456789", at_start=False)
    for _ in range(100):
        grammar.observe_mask(0.5)
    assert [len(reply.look_ahead(digits, seconds)) for seconds in (0.2, 0.9, 1.4, 2.4, 60.0)] == [0, 0, 1, 3, 10]


def test_several_tokens_are_accepted_with_one_request(
    tokenizer: Tokenizer, make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]]
) -> None:
    compiler, _ = make_compiler()
    grammar = asyncio.run(compiler.compile(GrammarSource("regex", "[0-9]{2}(, which is all)")))
    first, second = tokenizer.encode_plain("12", at_start=False)
    together, alone = grammar.start(jumps=True), grammar.start(jumps=True)
    together.prefetch_accept([first, second])
    assert (together.accept(first), alone.accept(first)) == ((), ())
    assert not together.ended
    forced = together.accept(second)
    assert tokenizer.decode(forced, continues_text=True) == ", which is all"
    assert (forced, together.ended) == (alone.accept(second), True)


@pytest.mark.parametrize("forks", [True, False])
def test_concurrent_replies_get_their_own_answers(
    tokenizer: Tokenizer, make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]], forks: bool
) -> None:
    compiler, _ = make_compiler(forks=forks)
    words = ["alphabetically sorted", "numbered by hand", "randomly"]
    grammar = asyncio.run(compiler.compile(GrammarSource.choice(words)))
    replies = [grammar.start(jumps=True) for _ in words]
    firsts = [tokenizer.encode_plain(word, at_start=False)[0] for word in words]
    masks = [np.zeros(-(-tokenizer.vocab_size // 32), np.int32) for _ in words]
    for reply in replies:
        reply.prefetch_mask()
    for reply, mask in reversed(list(zip(replies, masks, strict=True))):
        assert reply.fill(mask)
    assert all((mask == masks[0]).all() for mask in masks)
    for reply, first in zip(replies, firsts, strict=True):
        reply.prefetch_accept([first])
    followed = [reply.accept(first) for reply, first in zip(replies, firsts, strict=True)]
    told = [tokenizer.decode([first, *rest], continues_text=True) for first, rest in zip(firsts, followed, strict=True)]
    assert told == words
    assert all(reply.ended for reply in replies)


def test_first_process_is_restarted_after_it_dies(
    tokenizer: Tokenizer, make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]]
) -> None:
    compiler, starter = make_compiler()
    asyncio.run(compiler.prepare())
    os.kill(starter.first_pid, signal.SIGKILL)
    assert longest_reply_length(asyncio.run(compiler.compile(FAST)), tokenizer)


def test_grammar_process_without_fork_compiles_and_enforces_limits(
    tokenizer: Tokenizer, make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]]
) -> None:
    limits = GrammarLimits(compile_cpu_seconds=600, compile_wall_seconds=600)
    compiler, _ = make_compiler(limits, forks=False)
    limited, _ = make_compiler(replace(limits, compile_wall_seconds=1), forks=False)
    asyncio.run(compiler.prepare())
    choices = GrammarSource.choice(["alphabetically sorted", "numbered"])
    constraint = asyncio.run(compiler.compile(choices)).start(jumps=True)
    (first,) = tokenizer.encode_plain("alpha", at_start=False)
    assert tokenizer.decode(constraint.accept(first), continues_text=True) == "betically sorted"
    assert constraint.ended
    with pytest.raises(InvalidGrammar, match="too complex"):
        asyncio.run(asyncio.wait_for(limited.compile(SLOW), HANGING_SECONDS))
    with pytest.raises(InvalidGrammar, match="itself"):
        asyncio.run(compiler.compile(GrammarSource.schema({"$ref": "#"})))


def test_grammar_process_ends_when_its_last_reference_is_dropped(
    make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]],
) -> None:
    compiler, starter = make_compiler()
    asyncio.run(compiler.compile(FAST))
    assert starter.children() == 1
    compiler._cache.clear()
    gc.collect()
    until(lambda: starter.children() == 0)


def test_all_processes_end_when_the_compiler_is_dropped(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    asyncio.run(compiler.compile(FAST))
    assert compiler._starter._first is not None
    process = compiler._starter._first[0]
    del compiler
    gc.collect()
    until(lambda: process.poll() is not None)


def test_failed_start_raises_grammars_unavailable(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.process.limited_process.sys.executable", "/nowhere")
    for forks in (True, False):
        compiler = GrammarCompiler(tokenizer, starter=CountingStarter(tokenizer, forks=forks))
        with pytest.raises(GrammarsUnavailable, match="cannot start"):
            asyncio.run(compiler.compile(FAST))
    monkeypatch.setattr("app.process.limited_process.sys.executable", "/bin/false")
    for forks in (True, False):
        compiler = GrammarCompiler(tokenizer, starter=CountingStarter(tokenizer, forks=forks))
        with pytest.raises(GrammarsUnavailable):
            asyncio.run(compiler.compile(FAST))


def test_internal_failure_is_logged_and_refuses_the_grammar(
    make_compiler: Callable[..., tuple[GrammarCompiler, CountingStarter]], caplog: pytest.LogCaptureFixture
) -> None:
    compiler, _ = make_compiler()
    with pytest.raises(InvalidGrammar, match="cannot be compiled"):
        asyncio.run(compiler.compile(GrammarSource("json", "{")))
    assert "JSONDecodeError" in caplog.text


def test_packed_vocabulary_is_unpacked_unchanged(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer)
    there = Vocabulary.unpacked(vocabulary.packed())
    assert [list(there.tokens), list(there.special), list(there.ends)] == [
        list(vocabulary.tokens), list(vocabulary.special), list(vocabulary.ends)
    ]  # fmt: skip
    assert Vocabulary.unpacked(Vocabulary([b"", b"a"], [], [1], None).packed()).bos is None


@pytest.mark.parametrize(
    "sent", [b"", b"\x00\x00", b"\xff\xff\xff\xff\x01\x00\x00\x00\x00", b"\x00\x00\x00\x00\xee" + b"\x00" * 4]
)
def test_invalid_frames_close_the_connection(sent: bytes) -> None:
    left = bytearray(sent)

    def receive(size: int) -> bytes:
        part = bytes(left[:3])
        del left[:3]
        return part

    with pytest.raises(ConnectionLost):
        Channel(receive, lambda data: None).receive()
    whole: list[bytes] = []
    Channel(receive, whole.append).send(Frame(Kind.MASK, 7, b"abc"))
    left += b"".join(whole)
    assert Channel(receive, whole.append).receive() == Frame(Kind.MASK, 7, b"abc")
