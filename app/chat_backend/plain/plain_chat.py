"""The chat without screens: reads lines and prints replies in whole words.

Screen readers speak each write as one unit, so a write must not end inside a word.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from shutil import get_terminal_size
from typing import TextIO

from app.chat_backend.engine.loading_state import LINE_SECONDS, LoadingLines
from app.chat_backend.plain import tools
from app.chat_backend.plain.commands import PlainCommands
from app.chat_backend.plain.completion import Completion
from app.chat_backend.plain.input_lines import (
    INTERRUPTED,
    EditedLines,
    InputLines,
    PlainLines,
    can_edit,
    remember,
)
from app.chat_backend.plain.trimming import PlainTrimming
from app.chat_backend.plain.wrapping import Wrapping
from app.chat_backend.shutdown import Shutdown
from app.settings.settings import is_dumb_terminal
from tui.client import Client, ClientError
from tui.clipboard import Clipboard
from tui.commands import parse_command
from tui.drafts import Prompt, with_named_files
from tui.plain_text import sanitize
from tui.types import (
    ChatId,
    EngineRestarting,
    Finish,
    MessageId,
    PromptProgress,
    ReasoningDelta,
    ReplyEnd,
    TextDelta,
    ToolCalled,
    ToolReturned,
)

_LONG = 100  # characters of an unfinished line from which its whole words are written


class WholeWords:
    """Buffers text so that only whole lines, or whole words of long lines, are written."""

    def __init__(self) -> None:
        self._waiting = ""

    def add(self, text: str) -> str:
        """Append text, and return the part that can be written now."""
        self._waiting += text
        end = self._waiting.rfind("\n") + 1
        if not end and len(self._waiting) > _LONG:
            end = self._waiting.rfind(" ") + 1
        ready, self._waiting = self._waiting[:end], self._waiting[end:]
        return ready

    def rest(self) -> str:
        """Return the buffered text, and clear the buffer."""
        ready, self._waiting = self._waiting, ""
        return ready


_EXIT_OK, _EXIT_FAILURE = 0, 1
_WELCOME = "Type a message and press Enter. /help lists the commands, /quit leaves.\n^c stops a reply."
_HOW_TO_LEAVE = "Press ^c again to leave, or ^d."


def _width(stream: TextIO) -> int | None:
    """Return the number of cells in a line of a terminal. None: another kind of file."""
    return get_terminal_size().columns if stream.isatty() else None


def _line(text: str) -> str:
    """Return the text with a line end, unless it is empty."""
    return text + "\n" * bool(text)


class PlainChat:
    """A conversation with a user at a terminal, or with a pipe. Call `run` once."""

    def __init__(
        self,
        client: Client,
        clipboard: Clipboard,
        question: str = "",
        chat: ChatId | None = None,
        lists_chats: bool = False,
        is_private: bool = False,
    ) -> None:
        """Prepare the chat. `run` starts it.

        `chat`: the chat to open first; None: a new one, which may be private. With `lists_chats`, a list of all chats
        is printed first.
        """
        self._client = client
        self._first_chat = chat
        self._lists_chats = lists_chats
        self._question = question
        self._trimming = PlainTrimming(client, self._say, self._ask)
        self._commands = PlainCommands(client, self._say, self._trimming, self._agrees, clipboard)
        self._commands.is_private = is_private
        self._input: InputLines | None = None
        self._has_ended = False  # whether the input has ended
        self._is_leaving = False  # whether the last key was Ctrl-C on an empty line
        self._is_person = sys.stdin is not None and sys.stdin.isatty()
        self._doing: asyncio.Task[None] | None = None
        self._conversing: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._shutdown = Shutdown(self._end)
        self._is_loading = True  # until the first load ends, also if it fails
        self._is_saved = True
        self._failed = False
        self._ended_with = 0  # the exit status that a signal requests

    async def run(self) -> int:
        """Run until the end of input, /quit, or a signal. Returns the exit status."""
        loop = asyncio.get_running_loop()
        self._shutdown.listen("SIGTERM", "SIGHUP")
        with suppress(NotImplementedError):  # Windows
            loop.add_signal_handler(signal.SIGINT, self._interrupt)
        self._input = self._open_input(loop)
        self._run_in_background(self._tell_notices())
        self._run_in_background(self._tell_loading())
        self._run_in_background(self._recommend())
        self._conversing = asyncio.create_task(self._converse())
        try:
            await self._conversing
        except asyncio.CancelledError:
            if not self._ended_with:
                raise
        finally:
            for task in self._background:
                task.cancel()
            self._input.close()
        if self._ended_with:
            return self._ended_with
        return _EXIT_FAILURE if self._failed and not self._is_person else _EXIT_OK

    def _open_input(self, loop: asyncio.AbstractEventLoop) -> InputLines:
        if not can_edit():
            return PlainLines(self._write, self._note)
        completion = Completion(self._client, self._commands.commands(), loop)
        return EditedLines(completion.complete, has_modes=not is_dumb_terminal())

    async def _converse(self) -> None:
        if self._is_person:
            self._say(_WELCOME)
        if self._first_chat is not None:
            await self._do(self._commands.open_chat(self._first_chat))
        elif self._lists_chats:
            await self._do(self._take("/chats"))
        if self._question:
            await self._do(self._answer(self._question))
        while not self._commands.is_over and (line := await self._next_line()) is not None:
            await self._do(self._take(line.strip()))

    async def _do(self, work: Coroutine[None, None, None]) -> None:
        """Run one command or answer. Ctrl-C stops it; a partial reply is kept."""
        self._doing = asyncio.create_task(work)
        try:
            await self._doing
        except asyncio.CancelledError:
            if (conversing := asyncio.current_task()) is None or conversing.cancelling():
                raise  # the whole chat is ending
            self._note("Stopped.")
        except ClientError as problem:
            self._complain(problem)
        finally:
            self._doing = None

    async def _take(self, line: str) -> None:
        if not line:
            return
        if command := parse_command(line):
            if (again := await self._commands.do(*command)) is not None:
                await self._answer_again(again)
            return
        await self._answer(line)

    async def _restart_engine(self) -> None:
        """If the engine has exited, start it again, and print both that it restarts and that it is back."""
        engine = self._client.engine
        if self._is_loading or await engine.is_ready():
            return
        self._note("The engine has stopped. It starts again.")
        async with aclosing(engine.loading(retry=True)) as states:
            async for _ in states:
                pass
        self._note("The engine is ready.")

    async def _answer(self, text: str) -> None:
        chat, given = await self._commands.current(), Prompt(text, tuple(self._commands.attached))
        prompt = with_named_files(given)
        for file in prompt.attachments[len(given.attachments) :]:
            self._note(f"Attached {file.name}")
        await self._client.chats.save_draft(chat.summary.id, text)  # keeps the text if it cannot be sent
        await self._restart_engine()
        if await self._trimming.ensure_room(chat, chat.leaf, prompt.all_text):
            self._commands.attached.clear()
            message = await self._client.chats.add(chat.summary.id, chat.leaf, prompt.text, prompt.attachments)
            await self._write_reply(message.id)

    async def _answer_again(self, to: MessageId) -> None:
        await self._restart_engine()
        if await self._trimming.ensure_room(await self._commands.current(), to, ""):
            await self._write_reply(to)

    async def _write_reply(self, to: MessageId) -> None:
        """Request a reply to the message, and print it as it arrives."""
        chat = await self._commands.current()
        words, reported_at, is_thinking = WholeWords(), time.monotonic(), False
        lines = Wrapping(_width(sys.stdout))
        async with aclosing(self._client.replies.reply(chat.summary.id, to)) as events:
            async for event in events:
                if isinstance(event, EngineRestarting):
                    await self._restart_engine()
                elif isinstance(event, PromptProgress) and time.monotonic() - reported_at > LINE_SECONDS:
                    reported_at = time.monotonic()
                    self._note(f"Processed {event.done} of {event.total} prompt tokens")
                elif isinstance(event, ReasoningDelta) and not is_thinking:
                    is_thinking = True
                    self._note("Thinking")
                elif isinstance(event, TextDelta):
                    self._write(lines.wrap(words.add(event.text)))
                elif isinstance(event, ToolCalled | ToolReturned):
                    await self._tell_tool(event, lines.wrap(_line(words.rest())))
                elif isinstance(event, ReplyEnd):
                    self._write(lines.wrap(words.rest()) + "\n")
                    self._tell_end(event)
                    if event.finish is not Finish.FAILED:
                        self._run_in_background(self._give_title(chat.summary.id))

    async def _tell_tool(self, event: ToolCalled | ToolReturned, text: str) -> None:
        """Print a tool call or its result in one line, after the pending text. Asks the user to allow the call."""
        self._write(text)
        if isinstance(event, ToolReturned):
            self._note(tools.result_line(event))
            return
        self._note(tools.call_line(event))
        if event.asks:
            answer = await self._ask(tools.QUESTION) if self._is_person else ""
            self._client.tools.answer(event.call, tools.permission(answer))

    def _tell_end(self, end: ReplyEnd) -> None:
        if end.finish is Finish.FAILED:
            self._failed = True
            self._note(f"error: {end.error.partition(chr(10))[0]}")
        elif end.finish is Finish.LENGTH:
            self._note("Reply cut at its limit of tokens. Raise it with /set max_tokens NUMBER.")
        elif end.finish is Finish.CONTEXT_FULL:
            self._note("Reply cut because the context is full. /room removes old messages from it.")
        elif end.finish is Finish.STOPPED:
            self._note("Stopped.")

    async def _tell_loading(self) -> None:
        lines = LoadingLines()
        try:
            async with aclosing(self._client.engine.loading()) as states:
                async for state in states:
                    if line := lines.line(state):
                        self._note(line)
        except ClientError:
            return  # the caller that needs the model reports the error
        finally:
            self._is_loading = False

    async def _tell_notices(self) -> None:
        async with aclosing(self._client.chats.notices()) as notices:
            async for notice in notices:
                self._is_saved = notice.is_saved
                self._note(f"{notice.message} {notice.remedy}".strip())

    async def _recommend(self) -> None:
        """Suggest a better model to a new user."""
        with suppress(ClientError):
            if self._is_person and (better := await self._client.models.recommended()) is not None:
                self._note(f"This machine can run {better.model}. It {better.verdict}.")
                self._note(
                    f"/load {better.model} downloads it. To make it the default: ingle config set model {better.model}"
                )

    async def _next_line(self) -> str | None:
        """Return the next line that was not abandoned with Ctrl-C. None: the chat ends."""
        while (line := await self._read_line(self._prompt())) is not None:
            if INTERRUPTED not in line:
                self._is_leaving = False
                if can_edit():
                    remember(line.strip())
                return line
            if line.strip("\n") == INTERRUPTED:
                self._hint_at_leaving()
            if self._ended_with:  # another line would set the terminal up again after it was restored
                break
        return None

    def _prompt(self) -> str:
        if not self._is_person:
            return ""
        saved = "> " if self._is_saved else "(not saved) > "
        return "private> " if self._commands.is_private else saved

    async def _read_line(self, prompt: str) -> str | None:
        """Return a line as typed, or None if the input has ended."""
        if self._input is None or self._has_ended:
            return None
        line = await self._input.next(prompt)
        self._has_ended = line is None
        if self._has_ended and self._is_person:
            self._write("\n")  # the end of the input leaves the cursor after the prompt
        return line

    def _hint_at_leaving(self) -> None:
        """Print how to leave. The second Ctrl-C in a row on an empty line ends the chat."""
        if self._is_leaving:
            self._shutdown.request(signal.SIGINT)
        else:
            self._is_leaving = True
            self._note(_HOW_TO_LEAVE)

    async def _ask(self, question: str) -> str:
        """Ask a question and return the line that answers it. Earlier input is discarded.

        Returns "" if stdin is a pipe, or if the user presses Ctrl-C.
        """
        if not self._is_person or self._input is None:
            return ""
        self._input.discard()
        self._say(question)
        line = await self._read_line(self._prompt()) or ""
        return "" if INTERRUPTED in line else line

    async def _agrees(self, question: str) -> bool:
        """Ask a question. Returns whether the answer is yes; always True if stdin is a pipe."""
        return not self._is_person or (await self._ask(question)).strip().lower() in ("y", "yes")

    async def _give_title(self, chat: ChatId) -> None:
        """Give the chat a title. Errors are ignored, because the next reply tries again."""
        with suppress(ClientError):
            await self._client.chats.title(chat)

    def _run_in_background(self, work: Coroutine[None, None, None]) -> None:
        """Run a task in the background until the chat ends."""
        self._background.add(task := asyncio.create_task(work))
        task.add_done_callback(self._background.discard)

    def _interrupt(self) -> None:
        """Handle SIGINT: stop the running command or reply, or leave."""
        if self._doing is not None and self._is_person:
            self._write("\n")
            self._doing.cancel()
        elif self._is_person:
            self._hint_at_leaving()
        else:
            self._shutdown.request(signal.SIGINT)

    def _end(self, status: int) -> None:
        self._ended_with = status
        if self._conversing is not None:
            self._conversing.cancel()

    def _complain(self, problem: ClientError) -> None:
        self._failed = True
        self._note(f"error: {problem.message}")
        for line in problem.details.splitlines():
            self._note(line)
        if problem.remedy:
            self._note(f"try: {problem.remedy}")

    def _say(self, line: str) -> None:
        self._write(Wrapping(_width(sys.stdout)).wrap(f"{sanitize(line)}\n"))

    def _note(self, line: str) -> None:
        """Write a message to stderr. The line that the user is typing moves below it."""
        shown = self._input.shown() if self._input is not None else ""
        first, end, rest = Wrapping(_width(sys.stderr)).wrap(sanitize(line)).partition("\n")
        sys.stderr.write("\r" * bool(shown) + f"{first:<{len(shown)}}{end}{rest}\n")
        sys.stderr.flush()
        self._write(shown)

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
