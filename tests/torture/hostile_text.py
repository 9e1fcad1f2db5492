"""Show texts with terminal escape sequences in all screens of the chat.

    python -m tests.torture.hostile_text

The screens run in a pseudo-terminal. Titles, messages, reasoning, errors, and the names of models, files, presets,
requests, and clients contain such texts. The program opens and searches each chat, and shows each screen. Then it
checks the bytes that the terminal received: the screens must need each kind of escape sequence in them.
"""

import argparse
import asyncio
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from textual.pilot import Pilot

from tests.support.terminal_screen import Terminal, python
from tests.torture.killed_chats import HOSTILE
from tests.tui.scripted_client import HERE, USAGE, ScriptedClient, ScriptedModels
from tui.app import ChatApp
from tui.client import ClientError
from tui.engine_types import EngineRequest, Fit, ModelInfo, Phase, RequestId
from tui.screens.chat import ChatScreen
from tui.types import Attachment, ChatId, ChatSettings, Finish, Preset, ReasoningDelta, ReplyEnd, TextDelta
from tui.widgets.conversation import Conversation
from tui.widgets.folded import Reasoning

TEXTS_PER_CHAT = 9  # number of hostile texts in one chat
BATCH = 200  # number of texts in one run of the screens
MARKUP = "[/] [b]x"  # the screens would fail if they parsed this text as markup
# Allowed escape sequences: colors, cursor positions and shapes, modes, keys, and the queries that Textual sends.
_EXPECTED = re.compile(
    rb"\x1b\[(?:(?P<style>[\d;]*)m|\d+;\d+H|\?[\d;]+[hlu$p]+|[>=<]\d*u|\d* q|\??6?[cn]|2J|H|K|>0q|\?u)|\x1b\]1[012];"
)
_COLOR = re.compile(rb"[34]8;(?:5;\d+|2;\d+;\d+;\d+)")
_POINTER = re.compile(rb"\x1b]22;[a-z]+\x07")  # sets the shape of the mouse pointer
# The address that F4 copies, in base64. It starts with http://127.0.0.1:
_COPIED_ADDRESS = re.compile(rb"\x1b]52;c;aHR0cDovLzEyNy4wLjAuMTo[\w=]+\x07")
# Matches the starts of escape sequences, and control characters.
_STARTS = re.compile(rb"\x1b|\xc2[\x80-\x9f]|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]")


def hostile_texts(count: int, seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    for number in range(count):
        yield draw.choice(HOSTILE).format(f"evil{number}.") + draw.choice(("", MARKUP))


class HostileModels(ScriptedModels):
    """Models with hostile names."""

    names: Sequence[str] = ()

    async def installed(self) -> Sequence[ModelInfo]:
        return [replace(HERE, name=name, quantization=name, license=name) for name in self.names]

    catalog = installed

    async def fit(self, name: str) -> Fit:
        return Fit(name, is_possible=True)


class ScreenTour:
    """A run of the chat's screens that opens each of them and then exits."""

    def __init__(self, texts: Iterator[str], chats: int) -> None:
        self.scripted = ScriptedClient()
        self.chat_ids = [self._add_chat(*(next(texts) for _ in range(TEXTS_PER_CHAT))) for _ in range(chats)]
        models = HostileModels()
        models.names = [next(texts) for _ in range(20)]
        self.scripted.models = models
        self.scripted.engine.loads.set()
        self.scripted.engine.requests = tuple(
            EngineRequest(RequestId(name), name, name, Phase.WRITING, 1, 1, 1, 1.0) for name in models.names
        )
        names = [next(texts) for _ in range(5)]
        self.scripted.chats.kept_presets = {name: Preset(name, ChatSettings(system=name)) for name in names}
        self.error_texts = [next(texts) for _ in range(6)]
        self.app = ChatApp(self.scripted)

    def _add_chat(
        self, title: str, question: str, file: str, model: str, reasoning_text: str, answer: str, *more: str
    ) -> ChatId:
        name = self.scripted.keep(
            title, f"{question}\n{more[0]}", f"{answer} `{more[1]}`\n\n```{more[2]}\n{more[2]}\n```"
        )
        chat = self.scripted.chats.chats[name]
        message, reply = chat.messages
        message = replace(message, attachments=(Attachment(file, file),))
        reply = replace(reply, model=model, reasoning=reasoning_text, usage=replace(USAGE, miss=reasoning_text))
        self.scripted.chats.chats[name] = replace(chat, messages=(message, reply))
        return name

    async def run(self) -> int:
        """Show all screens and return the exit status of the program."""
        await self.app.run_async(auto_pilot=self._show_screens)
        return self.app.return_code or 0

    async def _show_screens(self, pilot: Pilot[object]) -> None:
        await pilot.pause()
        conversation = self.app.screen.query_one(Conversation)
        for chat in self.chat_ids:
            await conversation.open(chat)
            for reasoning in conversation.query(Reasoning):
                reasoning.folded = False
            await self._wait()
        for key in ("f1", "f2", "2", "f3", "f4", "ctrl+f", "ctrl+s", "ctrl+t"):
            self.app.simulate_key(key)
            await self._wait()
            if key == "ctrl+f":
                for letter in "evil":
                    self.app.simulate_key(letter)
                await self._wait(8)
            if key not in ("f2", "f4"):
                self.app.simulate_key("escape")
                await self._wait()
        while not isinstance(self.app.screen, ChatScreen):
            self.app.pop_screen()
        await self._show_errors(conversation)
        self.app.exit()

    async def _show_errors(self, conversation: Conversation) -> None:
        """Request replies that end in errors of the engine and of the client."""
        question, answer, reasoning_text, error, message, remedy = self.error_texts
        self.scripted.replies.scripts = [
            [ReasoningDelta(reasoning_text), TextDelta(answer), ReplyEnd(Finish.FAILED, USAGE, error=error)],
            [ClientError(message, remedy)],
        ]
        for _ in range(2):
            await conversation.open_new()
            conversation.composer.area.write(question)
            self.app.simulate_key("enter")
            await self._wait(10)

    async def _wait(self, frames: int = 2) -> None:
        await asyncio.sleep(0.05 * frames)


def is_expected(output: bytes, at: int) -> bool:
    """Whether the escape sequence at index `at` is of a kind that the screens need. Blinking text is not allowed."""
    found = _EXPECTED.match(output, at)
    return found is not None and b"5" not in _COLOR.sub(b"", found["style"] or b"").split(b";")


def terminal_output(count: int, seed: int) -> bytes:
    """Return the bytes that the screens write to the terminal. Raises AssertionError if the screens fail."""
    with tempfile.TemporaryDirectory(prefix="ingle-chat-") as folder:
        command = ["-m", "tests.torture.hostile_text", "--screens", "--texts", str(count), "--seed", str(seed)]
        folders = {f"INGLE_{name}_DIR": str(Path(folder) / name) for name in ("STATE", "CACHE", "MODELS")}
        ended = Terminal(python(*command), {**folders, "COLUMNS": "120", "LINES": "40"}).ended()
    assert ended.status == 0, ended.output[-2000:]
    return _COPIED_ADDRESS.sub(b"", _POINTER.sub(b"", ended.output))


def check_texts(count: int, seed: int) -> None:
    seen, sequences, unexpected = 0, 0, Counter[bytes]()
    for batch in range(count // BATCH):
        output = terminal_output(BATCH, seed + batch)
        starts = [found.start() for found in _STARTS.finditer(output)]
        sequences += len(starts)
        unexpected.update(output[at : at + 12] for at in starts if not is_expected(output, at))
        seen += len(set(re.findall(rb"evil\d+\.", output)))
    print(f"seed {seed}: {count} texts, {seen} of them on the screens; of {sequences:,} sequences "
          f"{unexpected.total()} are unexpected {unexpected.most_common(5)}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--screens", action="store_true", help="run the screens themselves (used internally)")
    arguments = parser.parse_args()
    if arguments.screens:
        sys.exit(
            asyncio.run(
                ScreenTour(
                    hostile_texts(arguments.texts, arguments.seed), (arguments.texts - 40) // TEXTS_PER_CHAT
                ).run()
            )
        )
    else:
        check_texts(arguments.texts, arguments.seed)


if __name__ == "__main__":
    main()
