"""Byte streams to grammar processes, and the code that starts those processes.

A first process builds the vocabulary, and forks a copy for each grammar in milliseconds. Windows cannot fork, so each
grammar's process starts from scratch there and builds the vocabulary again.
"""

import contextlib
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Final, Protocol, cast

from app.errors import GrammarsUnavailable
from app.grammars.frames import READ_BYTES, Channel, ConnectionLost, Frame, GrammarLimits, Kind, Vocabulary
from app.process.limited_process import library_folders, start_isolated

START_SECONDS: Final = 60.0  # time limit for loading Python and the library, perhaps from a slow disk
_PROGRAM: Final = Path(__file__).with_name("process.py")
_ROOT: Final = Path(__file__).parents[2]
_AGAIN: Final = "Try again; if it fails again, restart the server."


class ProcessStream(Protocol):
    """The byte stream to one process."""

    def send(self, data: bytes) -> object: ...

    def receive(self, size: int) -> bytes:
        """Return about `size` bytes. Returns none after `end`, or after the process has ended. Raises TimeoutError."""
        ...

    def limit(self, seconds: float) -> None:
        """Set the time in seconds after which `receive` raises TimeoutError."""
        ...

    def end(self) -> None:
        """End the process, even during a computation. Thread-safe, and may be called any number of times."""
        ...

    def close(self) -> None:
        """End the process and release the stream. No other thread may be sending or receiving."""
        ...


class SocketStream:
    """The stream to a forked process. The process ends when its socket closes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.send = connection.sendall
        self.receive = connection.recv
        self.limit = connection.settimeout

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that is receiving

    def close(self) -> None:
        # Not done in `end`: a thread that is about to receive could get the next socket with the same descriptor.
        self.end()
        self._connection.close()


class PipeStream:
    """The stream to a process for one grammar. A thread reads its pipe, because a pipe has no time limit."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._seconds = START_SECONDS
        threading.Thread(target=_read_all, args=(process.stdout, self._received), daemon=True).start()

    def receive(self, size: int) -> bytes:
        try:
            return self._received.get(timeout=self._seconds)
        except queue.Empty:
            raise TimeoutError from None

    def send(self, data: bytes) -> None:
        unsent = memoryview(data)
        while unsent:
            unsent = unsent[cast(IO[bytes], self._process.stdin).write(unsent) :]

    def limit(self, seconds: float) -> None:
        self._seconds = seconds

    def end(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.end()
        self._process.wait()
        cast(IO[bytes], self._process.stdin).close()


def _read_all(stream: IO[bytes], received: "queue.SimpleQueue[bytes]") -> None:
    """Put all data into the queue, and an empty value when the process has ended."""
    with stream:
        while part := stream.read(READ_BYTES):
            received.put(part)
    received.put(b"")


class ProcessStarter:
    """Starts grammar processes for one vocabulary. Thread-safe."""

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], limits: GrammarLimits, *, forks: bool = sys.platform != "win32"
    ) -> None:
        self._vocabulary = vocabulary
        self.limits = limits
        self._forks = forks
        self._lock = threading.Lock()
        self._packed: bytes | None = None
        self._first: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def prepare(self) -> None:
        """Start the first process, and wait until it has built the vocabulary. Raises GrammarsUnavailable."""
        if self._forks:
            with self._lock:
                self._control()

    def start(self) -> ProcessStream:
        """Start a process for one grammar. Its first frame is READY. Raises GrammarsUnavailable."""
        if not self._forks:
            return self._spawned()
        ours, theirs = socket.socketpair()
        stream = SocketStream(ours)
        try:
            with theirs, self._lock:
                self._hand_over(theirs)
        except BaseException:
            stream.close()
            raise
        return stream

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _hand_over(self, served: socket.socket) -> None:
        try:
            socket.send_fds(self._control(), [b"f"], [served.fileno()])
        except OSError:  # the first process has died in the meantime
            self._drop()
            socket.send_fds(self._control(), [b"f"], [served.fileno()])

    def _control(self) -> socket.socket:
        if self._first is None:
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    self._first = self._process(theirs.fileno(), subprocess.DEVNULL), ours
            except BaseException:
                ours.close()
                raise
            ours.settimeout(START_SECONDS)
            channel = Channel(ours.recv, ours.sendall)
            try:
                channel.send(Frame(Kind.VOCABULARY, payload=self._packed_vocabulary()))
                channel.receive()
            except (ConnectionLost, TimeoutError) as error:
                self._drop()
                raise GrammarsUnavailable("The process that compiles grammars did not start", _AGAIN) from error
        return self._first[1]

    def _spawned(self) -> ProcessStream:
        stream = PipeStream(self._process(subprocess.PIPE, subprocess.PIPE))
        with self._lock:
            packed = self._packed_vocabulary()
        with contextlib.suppress(OSError, ConnectionLost):  # on failure, the process sends no READY frame
            Channel(stream.receive, stream.send).send(Frame(Kind.VOCABULARY, payload=packed))
        return stream

    def _process(self, stdin: int, stdout: int) -> "subprocess.Popen[bytes]":
        options = {**asdict(self.limits), "forks": self._forks}
        try:
            return start_isolated(
                _PROGRAM, options, [str(_ROOT), *library_folders("llguidance")], stdin=stdin, stdout=stdout
            )
        except OSError as error:
            raise GrammarsUnavailable(f"The process that compiles grammars cannot start: {error}", _AGAIN) from error

    def _packed_vocabulary(self) -> bytes:
        if self._packed is None:
            self._packed = self._vocabulary().packed()
        return self._packed

    def _drop(self) -> None:
        if self._first is not None:
            process, control = self._first
            self._first = None
            control.close()
            process.kill()
            process.wait()
