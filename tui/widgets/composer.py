"""What will be sent: the text that is typed, the files beside it, messages that wait for their turn, and what it costs.

What is typed is kept as a draft, and the context is measured, as soon as nothing has been typed for a moment.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Label, TextArea

from tui import commands
from tui.attaching import attachment
from tui.client import Client, NotLoaded
from tui.failures import told
from tui.nouns import Attachment
from tui.open_chat import OpenChat
from tui.widgets.budget_bar import BudgetBar
from tui.widgets.prompt_area import PromptArea
from tui.widgets.word_buttons import WordButtons, word

_PAUSE = 0.4  # seconds without a key


@dataclass(frozen=True, slots=True)
class Prompt:
    """A message that is not sent yet."""

    text: str
    attachments: tuple[Attachment, ...] = ()

    @property
    def all_text(self) -> str:
        """All that the model will read of it."""
        return "\n".join([*(attachment.text for attachment in self.attachments), self.text])


@dataclass(slots=True)
class Attached:
    """An attachment, and what it costs once that is known."""

    attachment: Attachment
    tokens: int | None = None

    def __str__(self) -> str:
        cost = "…" if self.tokens is None else f"{self.tokens:,}"
        return f"{self.attachment.name} ({cost} tokens)"


class Composer(Vertical):
    """The lower part of the chat."""

    class Submitted(Message):
        """Enter: to be sent, or a command to be run. The composer has been emptied."""

        def __init__(self, prompt: Prompt) -> None:
            super().__init__()
            self.prompt = prompt

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._chat = OpenChat()
        self._attached: list[Attached] = []
        self._queue: list[Prompt] = []

    def compose(self) -> ComposeResult:
        yield Label("", id="queue", markup=False)
        yield Label("", id="hints", markup=False)
        yield WordButtons(id="attached")
        yield BudgetBar()
        yield PromptArea()

    @property
    def area(self) -> PromptArea:
        return self.query_one(PromptArea)

    @property
    def prompt(self) -> Prompt:
        """All that would be sent now."""
        return Prompt(self.area.text.strip(), tuple(attached.attachment for attached in self._attached))

    def write(self, prompt: Prompt) -> None:
        """Replace what is there."""
        self._attached = [Attached(attachment) for attachment in prompt.attachments]
        self.area.write(prompt.text)
        for attached in self._attached:
            self.price(attached)
        self._show_attached()

    def attach(self, found: Attachment) -> None:
        """Put a file beside the text."""
        self._attached.append(Attached(found))
        self._show_attached()
        self.price(self._attached[-1])

    @work(description="price")
    async def price(self, attached: Attached) -> None:
        """Find out what an attachment costs. That no model is there to say it has been told."""
        with told(self), suppress(NotLoaded):
            attached.tokens = await self._client.replies.count_tokens(attached.attachment.text)
            self._show_attached()

    # --- drafts, and the context

    async def start(self) -> None:
        """What was sent and typed before; unless something has been typed already."""
        with told(self):
            self.area.remember(await self._client.chats.inputs())
            draft = await self._client.chats.draft()
            if self._chat.id is None and not self.area.text:
                self.write(Prompt(draft))

    async def keep_draft(self) -> None:
        """What is typed, at once."""
        with told(self):
            await self._client.chats.keep_draft(self._chat.id, self.prompt.text)

    def belong_to(self, chat: OpenChat) -> None:
        """What is typed from now on is for this chat."""
        self._chat = chat
        self.measure()

    @work(exclusive=True, group="measure")
    async def measure(self) -> None:
        """Keep the draft and show how full the context is, in a moment."""
        await asyncio.sleep(_PAUSE)
        await self.keep_draft()
        with told(self), suppress(NotLoaded):
            budget = await self._client.context.budget(self._chat.id, self._chat.leaf, self.prompt.all_text)
            for bar in self.query(BudgetBar):  # none, while the screen is closed
                bar.budget = budget

    # --- messages that wait for the reply to end

    def queue(self, prompt: Prompt) -> None:
        """Send this one later."""
        self._queue.append(prompt)
        self._show_queue()

    def next_in_queue(self) -> Prompt | None:
        """Take the first one that waits."""
        prompt = self._queue.pop(0) if self._queue else None
        self._show_queue()
        return prompt

    def put_back(self, prompt: Prompt) -> None:
        """What could not be sent, in front of what waits behind it and what has been typed since."""
        self._queue.insert(0, prompt)
        self.take_back_queue()

    def take_back_queue(self) -> None:
        """Put what waits back to where it was typed; nothing is sent."""
        waiting, typed = self._queue, self.prompt
        if not waiting:
            return
        self._queue = []
        everything = [*waiting, typed]
        text = "\n\n".join(prompt.text for prompt in everything if prompt.text)
        self.write(Prompt(text, tuple(one for prompt in everything for one in prompt.attachments)))
        self._show_queue()

    def _show_queue(self) -> None:
        lines = [f"next: {prompt.text.splitlines()[0] if prompt.text else '(files)'}" for prompt in self._queue]
        self._show("#queue", "\n".join(lines))

    # --- what is typed

    @on(PromptArea.Entered)
    def submit(self, event: PromptArea.Entered) -> None:
        event.stop()
        prompt = Prompt(event.text, self.prompt.attachments)
        if prompt.text or prompt.attachments:
            self._attached = []
            self._show_attached()
            self.post_message(self.Submitted(prompt))

    @on(TextArea.Changed)
    def suggest(self) -> None:
        found = commands.beginning_with(self.area.text)[:6]
        self._show("#hints", "\n".join(f"/{one.name} {one.takes}".ljust(18) + one.help for one in found))
        self.measure()

    @on(PromptArea.LongPasted)
    def attach_pasted(self, event: PromptArea.LongPasted) -> None:
        event.stop()
        number = 1 + sum(attached.attachment.name.startswith("pasted") for attached in self._attached)
        self.attach(Attachment(f"pasted-{number}.txt", event.text))

    @on(PromptArea.PathPasted)
    def attach_file(self, event: PromptArea.PathPasted) -> None:
        event.stop()
        self.attach_path(event.path)

    def attach_path(self, path: Path) -> None:
        """Put the file at `path` beside the text."""
        with told(self):
            self.attach(attachment(path))

    def action_detach(self) -> None:
        """Take the files away again."""
        self._attached = []
        self._show_attached()

    def _show_attached(self) -> None:
        names = ", ".join(str(attached) for attached in self._attached)
        label = self.query_one("#attached", WordButtons)
        label.update(Content.assemble(f"+ {names}  ", word("remove", "detach")))
        label.display = bool(names)
        self.measure()

    def _show(self, selector: str, text: str) -> None:
        label = self.query_one(selector, Label)
        label.update(text)
        label.display = bool(text)
