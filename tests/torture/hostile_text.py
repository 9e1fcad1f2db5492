"""Texts that would drive a terminal, shown in every part of the chat's screens.

    python -m tests.torture.hostile_text

The screens run in a pseudo-terminal of their own. Titles, messages, thoughts, errors, and the names of models, files,
presets, requests and clients are such texts; each chat is opened, searched, and each screen looked at. Then the bytes
that reached the terminal are read: each of their sequences must be of a kind that the screens themselves need.
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
from tests.torture.killed_chats import EVIL
from tests.tui.scripted_client import HERE, USAGE, ScriptedClient, ScriptedModels
from tui.app import ChatApp
from tui.client import ClientError
from tui.engine_types import EngineRequest, Fit, ModelInfo, Phase, RequestId
from tui.screens.chat import ChatScreen
from tui.types import Attachment, ChatId, ChatSettings, Finish, Preset, ReasoningDelta, ReplyEnd, TextDelta
from tui.widgets.conversation import Conversation
from tui.widgets.folded import Reasoning

A_CHAT = 9  # texts
BATCH = 200  # of one run of the screens
SIGNS = "[/] [b]x"  # markup, too
# What may come: colours, places of the cursor, modes, its shape, keys and questions of Textual's own.
_OURS = re.compile(
    rb"\x1b\[(?:(?P<style>[\d;]*)m|\d+;\d+H|\?[\d;]+[hlu$p]+|[>=<]\d*u|\d* q|\??6?[cn]|2J|H|K|>0q|\?u)|\x1b\]1[012];"
)
_COLOUR = re.compile(rb"[34]8;(?:5;\d+|2;\d+;\d+;\d+)")
_POINTER = re.compile(rb"\x1b]22;[a-z]+\x07")  # the mouse's
_ADDRESS = re.compile(rb"\x1b]52;c;aHR0cDovLzEyNy4wLjAuMTo[\w=]+\x07")  # copied with F4: http://127.0.0.1:
_STARTS = re.compile(rb"\x1b|\xc2[\x80-\x9f]|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]")  # of sequences, and bells


def evil(count: int, seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    for number in range(count):
        yield draw.choice(EVIL).format(f"evil{number}.") + draw.choice(("", SIGNS))


class HostileModels(ScriptedModels):
    """Models whose names are such texts."""

    names: Sequence[str] = ()

    async def installed(self) -> Sequence[ModelInfo]:
        return [replace(HERE, name=name, quantization=name, license=name) for name in self.names]

    catalog = installed

    async def fit(self, name: str) -> Fit:
        return Fit(name, is_possible=True)


class Visit:
    """Screens that are led everywhere, and ended."""

    def __init__(self, texts: Iterator[str], chats: int) -> None:
        self.scripted = ScriptedClient()
        self.kept = [self._keep(*(next(texts) for _ in range(A_CHAT))) for _ in range(chats)]
        models = HostileModels()
        models.names = [next(texts) for _ in range(20)]
        self.scripted.models = models
        self.scripted.engine.loads.set()
        self.scripted.engine.requests = tuple(
            EngineRequest(RequestId(name), name, name, Phase.WRITING, 1, 1, 1, 1.0) for name in models.names
        )
        names = [next(texts) for _ in range(5)]
        self.scripted.chats.kept_presets = {name: Preset(name, ChatSettings(system=name)) for name in names}
        self.last = [next(texts) for _ in range(6)]
        self.app = ChatApp(self.scripted)

    def _keep(self, title: str, said: str, file: str, model: str, thought: str, answer: str, *more: str) -> ChatId:
        name = self.scripted.keep(title, f"{said}\n{more[0]}", f"{answer} `{more[1]}`\n\n```{more[2]}\n{more[2]}\n```")
        chat = self.scripted.chats.chats[name]
        asked, reply = chat.messages
        asked = replace(asked, attachments=(Attachment(file, file),))
        reply = replace(reply, model=model, reasoning=thought, usage=replace(USAGE, miss=thought))
        self.scripted.chats.chats[name] = replace(chat, messages=(asked, reply))
        return name

    async def run(self) -> int:
        """The status of the program."""
        await self.app.run_async(auto_pilot=self._look)
        return self.app.return_code or 0

    async def _look(self, pilot: Pilot[object]) -> None:
        await pilot.pause()
        conversation = self.app.screen.query_one(Conversation)
        for chat in self.kept:
            await conversation.open(chat)
            for reasoning in conversation.query(Reasoning):
                reasoning.folded = False
            await self._seen()
        for key in ("f1", "f2", "2", "f3", "f4", "ctrl+f", "ctrl+s", "ctrl+t"):
            self.app.simulate_key(key)
            await self._seen()
            if key == "ctrl+f":
                for letter in "evil":
                    self.app.simulate_key(letter)
                await self._seen(8)
            if key not in ("f2", "f4"):
                self.app.simulate_key("escape")
                await self._seen()
        while not isinstance(self.app.screen, ChatScreen):
            self.app.pop_screen()
        await self._fail(conversation)
        self.app.exit()

    async def _fail(self, conversation: Conversation) -> None:
        """Replies that end in errors, of the engine and of the client."""
        said, answer, thought, error, message, remedy = self.last
        self.scripted.replies.scripts = [
            [ReasoningDelta(thought), TextDelta(answer), ReplyEnd(Finish.FAILED, USAGE, error=error)],
            [ClientError(message, remedy)],
        ]
        for _ in range(2):
            await conversation.open_new()
            conversation.composer.area.write(said)
            self.app.simulate_key("enter")
            await self._seen(10)

    async def _seen(self, frames: int = 2) -> None:
        await asyncio.sleep(0.05 * frames)


def is_ours(output: bytes, at: int) -> bool:
    """Whether a sequence is of a kind that the screens need; letters that blink are of none."""
    found = _OURS.match(output, at)
    return found is not None and b"5" not in _COLOUR.sub(b"", found["style"] or b"").split(b";")


def written(count: int, seed: int) -> bytes:
    """What the screens write to the terminal. Raises AssertionError where they end as they should not."""
    with tempfile.TemporaryDirectory(prefix="ingle-chat-") as place:
        command = ["-m", "tests.torture.hostile_text", "--screens", "--texts", str(count), "--seed", str(seed)]
        folders = {f"INGLE_{name}_DIR": str(Path(place) / name) for name in ("STATE", "CACHE", "MODELS")}
        ended = Terminal(python(*command), {**folders, "COLUMNS": "120", "LINES": "40"}).ended()
    assert ended.status == 0, ended.output[-2000:]
    return _ADDRESS.sub(b"", _POINTER.sub(b"", ended.output))


def looked_at(count: int, seed: int) -> None:
    seen, sequences, strange = 0, 0, Counter[bytes]()
    for batch in range(count // BATCH):
        output = written(BATCH, seed + batch)
        begins = [found.start() for found in _STARTS.finditer(output)]
        sequences += len(begins)
        strange.update(output[at : at + 12] for at in begins if not is_ours(output, at))
        seen += len(set(re.findall(rb"evil\d+\.", output)))
    print(f"seed {seed}: {count} texts, {seen} of them seen on the screens; of {sequences:,} sequences "
          f"{strange.total()} of no kind of ours {strange.most_common(5)}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--screens", action="store_true", help="Be the program that is looked at.")
    given = parser.parse_args()
    if given.screens:
        sys.exit(asyncio.run(Visit(evil(given.texts, given.seed), (given.texts - 40) // A_CHAT).run()))
    else:
        looked_at(given.texts, given.seed)


if __name__ == "__main__":
    main()
