"""The program that compiles grammars and computes masks, run in separate processes by `app.grammars.host`.

    python -I -S process.py OPTIONS FOLDER...

OPTIONS is a JSON object: the fields of `GrammarLimits`, and `forks`. Each FOLDER is added to the module search path.
The first frame on stdin is a vocabulary. If `forks` is true, stdin is a Unix socket. Each byte that follows on it comes
with another socket, and the process forks a copy of itself to serve that. Otherwise it serves stdin and stdout.

A copy serves one grammar and all replies that follow it. The grammar library can take minutes for a small grammar or
for one mask, and cannot be interrupted. So a copy that exceeds a limit ends, and the server sees the end of its stream.
"""

import collections
import contextlib
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

if __name__ == "__main__":
    # the terminal sends these signals to this process as well, but only the server handles them
    for name in {"SIGINT", "SIGHUP"} & signal.Signals.__members__.keys():
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    sys.path[:] = [*sys.argv[2:], *sys.path[1:]]  # drops the first entry, the folder of this file

import llguidance

from app.grammars.compiling import Compiler, problem_of, too_complex
from app.grammars.frames import (
    ACCEPT,
    LOOK_AHEAD,
    MASK,
    Accepted,
    Channel,
    ConnectionLost,
    Frame,
    GrammarLimits,
    GrammarProblem,
    GrammarText,
    Kind,
    Problem,
    Vocabulary,
    packed_ids,
    unpacked_ids,
)

# Slices of the vocabulary: tokens of text up to a length. The library allows all tokens of a slice at once in a
# position where any text of that length is allowed. Its default slices are 10 and 30 characters, so that for a text of
# at most 30 characters it checks most tokens one by one.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHARACTER}{{1,{most}}}" for most in (10, 12, 16, 30)), f"{_CHARACTER}+"]
LOOK_AHEAD_SECONDS = 0.001  # CPU seconds after which no further drafted token is tried, because a step waits
_BYTES = Vocabulary([*(bytes([value]) for value in range(256)), b"<end>"], [256], [256], None)


class _Wrapper:
    """The tokenizer interface that the library expects.

    `tokenize` returns the ids of a text that continues another text.
    """

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, tokenize: Callable[[bytes], list[int]]) -> None:
        self.eos_token_id = vocabulary.ends[0]
        self.bos_token_id = vocabulary.bos
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special)
        self._tokenize = tokenize

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenize(text.encode() if isinstance(text, str) else text) if text else []


@dataclass(slots=True)
class _ServerChannel:
    """The channel to the server, which also tokenizes. Each forked copy has its own channel."""

    channel: Channel
    # frames that arrived while waiting for token ids
    _early: collections.deque[Frame] = field(default_factory=collections.deque)

    def receive(self) -> Frame:
        """Return the next request. Raises ConnectionLost."""
        return self._early.popleft() if self._early else self.channel.receive()

    def tokenize(self, text: bytes) -> list[int]:
        """Return the ids of a text. Other requests may arrive before the answer. Raises ConnectionLost."""
        self.channel.send(Frame(Kind.TOKENIZE, payload=text))
        while (frame := self.channel.receive()).kind is not Kind.TOKENIZED:
            self._early.append(frame)
        return list(unpacked_ids(frame.payload))


def tokenizer_of(
    vocabulary: Vocabulary, tokenize: Callable[[bytes], list[int]], slices: list[str]
) -> llguidance.LLTokenizer:
    """Build the library's tokenizer, which is slow."""
    wrapper = _Wrapper(vocabulary, tokenize)
    built = llguidance.LLTokenizer(wrapper, eos_token=list(vocabulary.ends), slices=slices)  # type: ignore[arg-type]
    wrapper.tokens.clear()  # the library has its own copy
    return built


def bytes_tokenizer() -> llguidance.LLTokenizer:
    """Return a tokenizer of single bytes."""
    return tokenizer_of(_BYTES, list, [])


@dataclass(slots=True)
class _Reply:
    """The position of a reply in its grammar, and the positions after each of the drafted runs that may follow."""

    matcher: llguidance.LLMatcher
    ahead: list[llguidance.LLMatcher] = field(default_factory=list)

    def accept(self, payload: bytes) -> Sequence[Accepted]:
        self.ahead.clear()
        (jumps,) = ACCEPT.unpack_from(payload)
        return [_accept(self.matcher, token_id, jumps=jumps) for token_id in unpacked_ids(payload[ACCEPT.size :])]

    def look_ahead(self, payload: bytes) -> Sequence[int]:
        """Take drafted tokens as accepted, as long as the grammar allows them. Returns the lengths of the runs."""
        self.ahead.clear()
        jumps, most = LOOK_AHEAD.unpack_from(payload)
        drafted = unpacked_ids(payload[LOOK_AHEAD.size :])
        runs: list[int] = []
        matcher, until = self.matcher, time.process_time() + LOOK_AHEAD_SECONDS
        while len(runs) < most and (start := sum(runs)) < len(drafted) and time.process_time() < until:
            matcher = matcher.deep_copy()
            run = [drafted[start], *_accept(matcher, drafted[start], jumps=jumps).forced]
            if matcher.is_stopped() or run != [*drafted[start : start + len(run)]]:
                break
            self.ahead.append(matcher)
            runs.append(len(run))
        return runs

    def mask(self, payload: bytes) -> bytes:
        """Return the mask after a number of runs. Raises GrammarProblem."""
        (runs,) = MASK.unpack(payload)
        matcher = self.ahead[runs - 1] if runs else self.matcher
        mask = matcher.compute_bitmask()
        if problem := matcher.get_error():
            raise problem_of(problem)
        return mask


def _accept(matcher: llguidance.LLMatcher, token_id: int, *, jumps: bool) -> Accepted:
    """Accept a token, and the tokens that the grammar forces after it. Without `jumps` it forces none."""
    forced: list[int] = []
    if matcher.consume_token(token_id) and jumps:
        forced = matcher.compute_ff_tokens()
        if forced and not matcher.consume_tokens(forced):
            forced = []
    return Accepted(matcher.is_stopped() and not matcher.is_error(), forced)


@dataclass(slots=True)
class GrammarReplies:
    """The replies that follow one grammar."""

    start: llguidance.LLMatcher
    limits: GrammarLimits
    _replies: dict[int, _Reply] = field(default_factory=dict)
    _seconds: float = 0.0  # CPU seconds of all masks and tokens
    _steps: int = 0

    def answer(self, frame: Frame) -> Frame | None:
        """Return the answer to a frame about a reply."""
        if frame.kind is Kind.END:
            self._replies.pop(frame.reply, None)
            return None
        began = time.process_time()
        if frame.reply not in self._replies:
            self._replies[frame.reply] = _Reply(self.start.deep_copy())
        answer = self._answer(self._replies[frame.reply], frame)
        self._seconds += time.process_time() - began
        self._steps += steps_of(frame)
        if self.are_slow:
            detail = f"its masks take {self._seconds / self._steps * 1000:,.0f} ms on average"
            return Frame(Kind.FAILED, frame.reply, too_complex(detail).message.encode())
        return answer

    @property
    def are_slow(self) -> bool:
        """Whether the replies have used more CPU time than the limits allow."""
        most = self.limits.burst_cpu_seconds + self.limits.mean_cpu_seconds * self._steps
        return self._seconds > most

    @staticmethod
    def _answer(reply: _Reply, frame: Frame) -> Frame:
        if frame.kind is Kind.ACCEPT:
            return Frame(Kind.ACCEPTED, frame.reply, Accepted.packed(reply.accept(frame.payload)))
        if frame.kind is Kind.LOOK_AHEAD:
            return Frame(Kind.LOOKED_AHEAD, frame.reply, packed_ids(reply.look_ahead(frame.payload)))
        try:
            return Frame(Kind.MASKED, frame.reply, reply.mask(frame.payload))
        except GrammarProblem as problem:
            return Frame(Kind.FAILED, frame.reply, problem.message.encode())


def steps_of(frame: Frame) -> int:
    """Return the number of masks or tokens that a frame about a reply asks for."""
    heads = {Kind.ACCEPT: ACCEPT.size, Kind.LOOK_AHEAD: LOOK_AHEAD.size}
    return (len(frame.payload) - heads[frame.kind]) // 4 if frame.kind in heads else 1


def serve(server: _ServerChannel, compiler: Compiler, limits: GrammarLimits) -> None:
    """Compile the grammar of the first frame, then answer frames about its replies until the channel closes.

    Also returns when the replies have used too much CPU time.
    """
    channel = server.channel
    channel.send(Frame(Kind.READY))
    source = GrammarText.unpacked(server.receive().payload)
    with _within(limits.compile_cpu_seconds, limits.compile_wall_seconds):
        outcome = _compiled(compiler, source)
    if isinstance(outcome, Problem):
        channel.send(Frame(Kind.COMPILED, payload=outcome.packed()))
        return
    channel.send(Frame(Kind.COMPILED))
    replies = GrammarReplies(outcome, limits)
    while not replies.are_slow:
        frame = server.receive()
        with _within(limits.mask_cpu_seconds * steps_of(frame)):
            answer = replies.answer(frame)
        if answer is not None:
            channel.send(answer)


def _compiled(compiler: Compiler, source: GrammarText) -> llguidance.LLMatcher | Problem:
    try:
        return compiler.compile(source)
    except GrammarProblem as problem:
        return Problem(problem.message, problem.path)
    except BaseException:  # noqa: BLE001  # a panic of the library is not an Exception; the server logs it
        return Problem("It cannot be compiled.", trace=traceback.format_exc())


@contextlib.contextmanager
def _within(cpu_seconds: float, wall_seconds: float | None = None) -> Iterator[None]:
    """End this process if the body takes longer than a limit. The library cannot be stopped in another way."""
    if sys.platform == "win32":
        faulthandler.dump_traceback_later(wall_seconds or 2 * cpu_seconds, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
        return
    limits = ((signal.ITIMER_PROF, cpu_seconds), (signal.ITIMER_REAL, wall_seconds))
    for timer, seconds in limits:
        signal.setitimer(timer, seconds or 0)  # the timer's signal ends the process
    try:
        yield
    finally:
        for timer, _ in limits:
            signal.setitimer(timer, 0)


def _forever(control: socket.socket, compiler: Compiler, server: _ServerChannel, limits: GrammarLimits) -> None:
    """Fork a copy for each socket that arrives, until the server closes the control socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit statuses of copies are not needed
    gc.collect()
    gc.freeze()  # keeps memory shared with copies: the garbage collector writes to every object it visits
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        for descriptor in sockets:
            with socket.socket(fileno=descriptor) as served:
                if os.fork() == 0:
                    control.close()
                    _serve_alone(served, compiler, server, limits)


def _serve_alone(served: socket.socket, compiler: Compiler, server: _ServerChannel, limits: GrammarLimits) -> None:
    """Serve a socket in a forked copy, as its main function."""
    status = 1
    try:
        server.channel = Channel(served.recv, served.sendall)
        _limit_memory(limits.memory_bytes)
        threading.Thread(target=_end_with, args=(served,), daemon=True).start()
        serve(server, compiler, limits)
        status = 0
    except ConnectionLost:
        status = 0
    finally:
        os._exit(status)


def _end_with(served: socket.socket) -> None:
    """End this process when the server closes the channel, even during a computation."""
    import select

    poll = select.poll()
    poll.register(served, 0)  # no flags: only a hangup is reported, always
    poll.poll()
    os._exit(0)


def _limit_memory(more_bytes: int) -> None:
    """Limit the memory of this process to `more_bytes` above its current size. macOS has no such limit."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _write(data: bytes) -> None:
    unsent = memoryview(data)
    while unsent:
        unsent = unsent[os.write(1, unsent) :]


def main(options: dict[str, float | bool]) -> None:
    forks = options.pop("forks")
    limits = GrammarLimits(**options)  # type: ignore[arg-type]
    control = socket.socket(fileno=0) if forks else None
    receive, send = (partial(os.read, 0), _write) if control is None else (control.recv, control.sendall)
    server = _ServerChannel(channel := Channel(receive, send))
    vocabulary = Vocabulary.unpacked(channel.receive().payload)
    compiler = Compiler(tokenizer_of(vocabulary, server.tokenize, SLICES), bytes_tokenizer(), limits.mask_cpu_seconds)
    with contextlib.suppress(ConnectionLost):
        if control is not None:
            channel.send(Frame(Kind.READY))  # the server waits for this frame
            _forever(control, compiler, server, limits)
        else:
            serve(server, compiler, limits)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
