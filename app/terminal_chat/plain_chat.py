"""The chat as plain lines: for voices that read a screen aloud, terminals that can do no more, and pipes.

Nothing is drawn, coloured or moved; each line is written once. Ctrl-C stops a reply, and leaves the chat where none is
being written. Knows the port alone, as the screens do.
"""

import asyncio
import signal
import sys
import threading
import time
from contextlib import aclosing, suppress

from app.terminal_chat.plain_commands import PlainCommands
from app.terminal_chat.whole_words import WholeWords
from tui.client import Client, ClientError
from tui.commands import typed
from tui.nouns import Finish, MessageId, PromptProgress, ReplyEnd, ReplyStarted, TextDelta
from tui.plain_text import sanitize

_OFTEN = 5.0  # seconds between two lines about what is awaited
_EXIT_OK, _EXIT_FAILURE, _EXIT_INTERRUPTED = 0, 1, 130


class PlainChat:
    """One chat at a time, with a person or a pipe. `run` it once."""

    def __init__(self, client: Client, question: str = "") -> None:
        self._client = client
        self._question = question
        self._commands = PlainCommands(client, self._say)
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._replying: asyncio.Task[None] | None = None
        self._failed = False
        self._interrupted = False

    async def run(self) -> int:
        """Until the end of the input, or /quit. Gives the exit status."""
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError):  # Windows
            loop.add_signal_handler(signal.SIGINT, self._interrupt)
        threading.Thread(target=self._read, args=(loop,), name="input", daemon=True).start()
        telling = [asyncio.create_task(work) for work in (self._tell_loading(), self._recommend())]
        if sys.stdin.isatty():
            self._say("Type a message and press Enter. /help lists the commands, /quit leaves; Ctrl-C stops a reply.")
        if self._question:
            await self._answer(self._question)
        while not self._commands.is_over and (line := await self._next_line()) is not None:
            await self._take(line.strip())
        for task in telling:
            task.cancel()
        if self._interrupted:
            return _EXIT_INTERRUPTED
        return _EXIT_FAILURE if self._failed and not sys.stdin.isatty() else _EXIT_OK

    async def _take(self, line: str) -> None:
        if not line:
            return
        if command := typed(line):
            try:
                again = await self._commands.do(*command)
            except ClientError as problem:
                self._complain(problem)
                return
            if again is not None:
                await self._reply(again)
            return
        await self._answer(line)

    async def _answer(self, text: str) -> None:
        try:
            chat = await self._commands.current()
            message = await self._client.chats.add(chat.summary.id, chat.leaf, text)
        except ClientError as problem:
            self._complain(problem)
            return
        await self._reply(message.id)

    async def _reply(self, to: MessageId) -> None:
        """A reply, written as it comes; Ctrl-C ends it, and what has come is kept."""
        self._replying = asyncio.create_task(self._write_reply(to))
        try:
            with suppress(asyncio.CancelledError):
                await self._replying
        except ClientError as problem:
            self._complain(problem)
        finally:
            self._replying = None

    async def _write_reply(self, to: MessageId) -> None:
        chat = await self._commands.current()
        words, told_at = WholeWords(), time.monotonic()
        async with aclosing(self._client.replies.reply(chat.summary.id, to)) as events:
            async for event in events:
                if isinstance(event, ReplyStarted):
                    continue
                if isinstance(event, PromptProgress) and time.monotonic() - told_at > _OFTEN:
                    told_at = time.monotonic()
                    self._note(f"{event.done} of {event.total} tokens read")
                elif isinstance(event, TextDelta):
                    self._write(words.add(event.text))
                elif isinstance(event, ReplyEnd):
                    self._write(words.rest() + "\n")
                    self._tell_end(event)

    def _tell_end(self, end: ReplyEnd) -> None:
        if end.finish is Finish.FAILED:
            self._failed = True
            self._note(f"error: {end.error}")
        elif end.finish is Finish.LENGTH:
            self._note("The limit of tokens ended the reply.")
        elif end.finish is Finish.STOPPED:
            self._note("Stopped.")

    async def _tell_loading(self) -> None:
        told_at, told = 0.0, ""
        try:
            async with aclosing(self._client.engine.loading()) as states:
                async for state in states:
                    words = f"{state.model}: {state.stage}"
                    if words != told and time.monotonic() - told_at > _OFTEN:
                        told_at, told = time.monotonic(), words
                        self._note(words)
        except ClientError:
            return  # whoever needs the model is told

    async def _recommend(self) -> None:
        """Tell a person who is new here of a better model."""
        with suppress(ClientError):
            if sys.stdin.isatty() and (better := await self._client.models.recommended()) is not None:
                self._note(f"A better model fits this machine: {better.model}. It {better.verdict}.")
                self._note(f"/load {better.model} fetches it. As default: ingle config set model {better.model}")

    async def _next_line(self) -> str | None:
        if sys.stdin.isatty():
            self._write("> ")
        return await self._lines.get()

    def _interrupt(self) -> None:
        if self._replying is not None:
            self._replying.cancel()
            self._write("\n")
            self._note("Stopped.")
        else:
            self._interrupted = True
            self._lines.put_nowait(None)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """On a thread of its own, which ends with the process."""
        with suppress(RuntimeError, ValueError, OSError):  # the loop or stdin has gone
            for line in sys.stdin:
                loop.call_soon_threadsafe(self._lines.put_nowait, line)
            loop.call_soon_threadsafe(self._lines.put_nowait, None)

    def _complain(self, problem: ClientError) -> None:
        self._failed = True
        self._note(f"error: {problem.message}")
        if problem.remedy:
            self._note(f"try: {problem.remedy}")

    def _say(self, line: str) -> None:
        self._write(f"{sanitize(line)}\n")

    def _note(self, line: str) -> None:
        """Narration."""
        sys.stderr.write(f"{sanitize(line)}\n")
        sys.stderr.flush()

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
