"""The port of the chat: all that it asks of the rest of the program, as small protocols over plain data.

Whoever implements it keeps the chats, talks to an engine, and fetches models; nothing here says how. The rules of it:

- Every method that fails raises ClientError, which says what happened and what can be done, and nothing else.
- A call that needs the model waits until the model is loaded, and raises NotLoaded where it cannot be. Cancelling a
  call, or closing an iterator, ends it.
- Strings that people or models wrote are stored and sent as they are. The nouns make them harmless as they are built,
  so that nothing which crosses the port can drive a terminal.

Start it with `tui.app.ChatApp(client, theme="", chat=None, question="").run()`; the process then exits with the app's
`return_code`.
"""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol

from tui.engine_types import Download, EngineStatus, Fit, Loading, ModelInfo, Recommendation, RequestId, SearchResults
from tui.plain_text import sanitize
from tui.types import (
    Attachment,
    Chat,
    ChatId,
    ChatSettings,
    ChatSummary,
    ContextBudget,
    ExportFormat,
    FullContext,
    Message,
    MessageId,
    Notice,
    Preset,
    ReplyEvent,
    SearchHit,
    TrimPlan,
)


class ClientError(Exception):
    """What was asked for cannot be done. Both sentences are shown to the person."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = sanitize(message)
        self.remedy = sanitize(remedy)

    @property
    def sentences(self) -> str:
        """Both, one behind the other."""
        return f"{self.message.removesuffix('.')}. {self.remedy}".strip()


class NotLoaded(ClientError):
    """The model that was to answer could not be loaded, for a reason that `loading` or `load` has told."""


class Replies(Protocol):
    """What the model says."""

    def reply(self, chat: ChatId, to: MessageId) -> AsyncGenerator[ReplyEvent, None]:
        """A new reply to the message `to` (of a user), beside those that it has; by the settings of the chat.

        It becomes the chat's current leaf. Closing the iterator stops the engine as `stop` does. A model that could
        not be loaded is tried again.
        Raises ClientError before the first event where the engine refuses.
        """

    async def stop(self, message: MessageId) -> None:
        """End this reply now, in whatever phase; its stream then ends with STOPPED. Nothing if it has ended."""

    async def count_tokens(self, text: str) -> int:
        """How many tokens `text` costs in a prompt of the loaded model."""


class Chats(Protocol):
    """The chats that are kept. What a method has returned from is on the disk."""

    async def summaries(self, *, archived: bool = False) -> Sequence[ChatSummary]:
        """The pinned ones first, then the newest first. A chat in which nothing was written is not among them."""

    async def create(self, settings: ChatSettings, *, private: bool = False) -> Chat: ...

    async def open(self, chat: ChatId) -> Chat: ...

    async def add(
        self, chat: ChatId, parent: MessageId | None, text: str, attachments: Sequence[Attachment] = ()
    ) -> Message:
        """A new message of the user, which becomes the leaf. An edited message is a new one with the old one's parent.

        Its text also becomes the newest of `inputs`, and the chat's draft is gone.
        """

    async def rewrite(self, chat: ChatId, reply: MessageId, text: str) -> Message:
        """A reply as the person would have it: a new message beside it, which becomes the leaf."""

    async def show_branch(self, chat: ChatId, leaf: MessageId) -> None:
        """Remember which branch is shown."""

    async def configure(self, chat: ChatId, settings: ChatSettings) -> None: ...

    async def title(self, chat: ChatId) -> str:
        """The title that the client gives a chat after its first reply, if it has none yet; waits until it has one."""

    async def rename(self, chat: ChatId, title: str) -> None: ...

    async def pin(self, chat: ChatId, pinned: bool) -> None: ...

    async def archive(self, chat: ChatId, archived: bool) -> None: ...

    async def delete(self, chat: ChatId) -> None:
        """Out of all lists at once. Its text and its KV blocks are erased when it cannot be undone any more."""

    async def undelete(self, chat: ChatId) -> None:
        """Undo `delete`; possible until the program ends."""

    async def search(self, text: str) -> Sequence[SearchHit]:
        """Where all words of `text` stand, in messages and titles of all chats; the best first, at most 50."""

    async def draft(self) -> str:
        """What was typed for a new chat when this window ended; never what another window shows."""

    async def save_draft(self, chat: ChatId | None, text: str) -> None:
        """For a chat, or for the new one of this window. A chat with a draft and no messages is in the list."""

    async def inputs(self) -> Sequence[str]:
        """What was sent lately, in all chats that are not private; the newest first, at most 200."""

    async def presets(self) -> Sequence[Preset]: ...

    async def save_preset(self, preset: Preset) -> None:
        """A preset of the same name is replaced."""

    async def delete_preset(self, name: str) -> None: ...

    async def export(self, chat: ChatId, path: Path, form: ExportFormat) -> None:
        """Refuses a path where a file is."""

    def notices(self) -> AsyncGenerator[Notice, None]:
        """What happens to the store: what was found damaged, and whether chats are saved. Waits for more at the end."""

    async def import_chats(self, path: Path) -> Sequence[ChatSummary]:
        """The chats of a JSON file that `export` wrote, as new chats."""


class Context(Protocol):
    """What a model can be told at once."""

    async def budget(self, chat: ChatId | None, leaf: MessageId | None, typed: str) -> ContextBudget:
        """Of the branch that ends in `leaf`, and a new message after it."""

    async def plan(self, chat: ChatId, leaf: MessageId | None, how: FullContext, typed: str) -> TrimPlan:
        """What would go of the branch that ends in `leaf`, so that a new message after it has room: all, if it must.
        Without one, a question at the end stays, since it is to be answered."""

    async def trim(self, chat: ChatId, plan: TrimPlan) -> Chat:
        """Do as planned; a summary takes as long as a reply. Returns the chat as it is then."""


class Engine(Protocol):
    """The engine that serves this chat and all other clients."""

    def address(self) -> str:
        """Where other programs reach it, as they want it: "http://127.0.0.1:4645/v1". Empty while it starts."""

    def loading(self, *, retry: bool = False) -> AsyncGenerator[Loading, None]:
        """How the model loads that is to answer: at least that it is loaded, which ends it. One that could not be is
        tried `again`, where that is wanted."""

    async def status(self) -> EngineStatus: ...

    async def abort(self, request: RequestId) -> None:
        """End any client's request. Nothing if it has ended."""


class Models(Protocol):
    """Models on this machine and elsewhere."""

    async def installed(self) -> Sequence[ModelInfo]: ...

    async def catalog(self) -> Sequence[ModelInfo]: ...

    async def recommended(self) -> Recommendation | None:
        """A better model than the default one, for a machine that has none yet, and whose person has chosen none."""

    async def search(self, text: str) -> SearchResults:
        """Repositories of the Hub, by their names: to know more of one, ask for its variants. Where the Hub cannot be
        reached, models of the catalog."""

    async def variants(self, name: str) -> Sequence[ModelInfo]:
        """What a repository holds, one a quantization; what fits best first."""

    async def find(self, name: str) -> ModelInfo:
        """What is known of the model of that name without asking the Hub. Raises ClientError if there can be none."""

    async def free_disk(self) -> int | None:
        """Bytes that are free where models are stored; None if that is unknown."""

    async def fit(self, name: str) -> Fit:
        """Whether a model fits this machine, once the one that answers has made room, and with how long a context.

        Takes seconds, and some megabytes of the Hub where it is not here yet.
        """

    def pull(self, name: str) -> AsyncGenerator[Download, None]:
        """Fetch a model, from where it stopped last time. Closing the iterator pauses. Ends when it is installed.

        That of a model which the engine waits for goes on with that, and ends when it is loaded; who waits for the
        model does so while it is paused. Raises NotLoaded where it cannot be loaded, or is paused from elsewhere.
        """

    async def delete(self, name: str) -> None:
        """From this machine; what has arrived of it, too."""

    def load(self, name: str) -> AsyncGenerator[Loading, None]:
        """Replies come from this model from now on. Ends when it is loaded.

        Where it cannot be, the model before it is loaded again: ClientError says why when that one answers. So it is
        where the iterator is closed before its end; what has arrived of the model is kept.
        """


class Preferences(Protocol):
    """What the person chose for every start of the program."""

    async def save_theme(self, name: str) -> None:
        """Start with this theme from now on."""


class Client(Protocol):
    """The port: one object with all of it."""

    @property
    def replies(self) -> Replies: ...
    @property
    def chats(self) -> Chats: ...
    @property
    def context(self) -> Context: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def models(self) -> Models: ...
    @property
    def preferences(self) -> Preferences: ...
