"""The client of the screens: protocols for all functions that the screens need from the rest of the program.

An implementation stores the chats, talks to an engine, and downloads models. Rules for all methods:

- A method that fails raises ClientError, which says what happened and what to do. It raises nothing else.
- A call that needs the model waits until the model is loaded, and raises NotLoaded if loading fails. Cancelling a
  call, or closing an iterator, stops the operation.
- Text from users and models is stored and sent unchanged. The types in `types.py` sanitize their strings when they are
  created, so no text that the client returns can control a terminal.

Start the chat with `tui.app.ChatApp(client, theme="", chat=None, question="").run()`; the process then exits with the
app's `return_code`.
"""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol

from tui.engine_types import Download, EngineStatus, Fit, Loading, ModelInfo, Recommendation, RequestId, SearchResults
from tui.plain_text import capitalized, sanitize
from tui.types import (
    Attachment,
    CallId,
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
    Permission,
    Preset,
    ReplyEvent,
    Sampling,
    SearchHit,
    ToolServer,
    TrimPlan,
)


class ClientError(Exception):
    """A call of the client failed. The screens show the message and the remedy, and the details on request."""

    def __init__(self, message: str, remedy: str = "", details: str = "") -> None:
        super().__init__(message)
        self.details = sanitize(details)
        self.message = sanitize(message)
        self.remedy = sanitize(remedy)

    @property
    def sentences(self) -> str:
        """The message and the remedy as one text."""
        return f"{capitalized(self.message.removesuffix('.'))}. {self.remedy}".strip()

    @property
    def report(self) -> str:
        """The message and the remedy, followed by the details on a new line."""
        return f"{self.sentences}\n{self.details}".strip()


class NotLoaded(ClientError):
    """The model could not be loaded. The reason was already reported by `loading` or `load`."""


class Replies(Protocol):
    """Replies of the model."""

    def reply(self, chat: ChatId, to: MessageId) -> AsyncGenerator[ReplyEvent, None]:
        """Generate a new reply to the user's message `to`, as a sibling of its other replies, with the chat's settings.

        The reply becomes the current leaf of the chat. Closing the iterator stops the reply, as `stop` does. If the
        model failed to load before, loading is tried again. Raises ClientError before the first event if the engine
        rejects the request.
        """

    async def stop(self, message: MessageId) -> None:
        """Stop a reply, even before its first token: its stream ends with STOPPED. Does nothing if it has ended."""

    async def count_tokens(self, text: str) -> int:
        """Return how many tokens `text` takes in a prompt of the loaded model."""

    def estimates_counts(self) -> bool:
        """Whether `count_tokens` returns estimates, because the server cannot count tokens."""


class Tools(Protocol):
    """Tools of MCP servers, which the model can call."""

    def config_paths(self) -> Sequence[Path]:
        """Return the files that list tool servers. The first is mcp.json, which may not exist."""

    async def servers(self) -> Sequence[ToolServer]:
        """Read mcp.json again, and return its servers with their current state. Raises ClientError if it is invalid."""

    async def restart(self, server: str) -> None:
        """Start a server that has failed or is disabled. Returns when it is ready or has failed."""

    def answer(self, call: CallId, permission: Permission) -> None:
        """Answer the question whether a call may run. Does nothing if the call is no longer waiting."""

    async def revoke(self, tool: str) -> None:
        """Withdraw the permission for a tool that is always allowed, so that its calls ask again."""


class Chats(Protocol):
    """The stored chats. A change is on disk when the method returns."""

    async def summaries(self, *, archived: bool = False) -> Sequence[ChatSummary]:
        """Return the pinned chats, then the other chats, newest first. Chats without a message and without a draft are
        omitted.
        """

    async def create(self, settings: ChatSettings, *, private: bool = False) -> Chat: ...

    async def open(self, chat: ChatId) -> Chat: ...

    async def add(
        self, chat: ChatId, parent: MessageId | None, text: str, attachments: Sequence[Attachment] = ()
    ) -> Message:
        """Store a user message, which becomes the leaf. To edit a message, add a new one with the same parent.

        The text also becomes the newest entry of `inputs`, and the chat's draft is removed.
        """

    async def rewrite(self, chat: ChatId, reply: MessageId, text: str) -> Message:
        """Store the user's version of a reply as a sibling of that reply. It becomes the leaf."""

    async def show_branch(self, chat: ChatId, leaf: MessageId) -> None:
        """Store which branch is shown."""

    async def configure(self, chat: ChatId, settings: ChatSettings) -> None: ...

    async def title(self, chat: ChatId) -> str:
        """Return the chat's title. If it has none after its first reply, wait until the model has written one."""

    async def rename(self, chat: ChatId, title: str) -> None: ...

    async def pin(self, chat: ChatId, pinned: bool) -> None: ...

    async def archive(self, chat: ChatId, archived: bool) -> None: ...

    async def delete(self, chat: ChatId) -> None:
        """Remove the chat from all lists. Its text and KV blocks are erased when the program ends."""

    async def undelete(self, chat: ChatId) -> None:
        """Undo `delete`. Works only until the program ends."""

    async def search(self, text: str) -> Sequence[SearchHit]:
        """Find messages and titles that contain all words of `text`, best matches first, at most 50."""

    async def draft(self) -> str:
        """Return the draft that was in this window's new chat when the window was last closed.

        Drafts of other windows are never returned.
        """

    async def save_draft(self, chat: ChatId | None, text: str) -> None:
        """Save the draft of a chat, or of this window's new chat if `chat` is None.

        A chat with only a draft is listed.
        """

    async def inputs(self) -> Sequence[str]:
        """Return the last texts that the user sent, except in private chats: newest first, at most 200."""

    async def presets(self) -> Sequence[Preset]: ...

    async def save_preset(self, preset: Preset) -> None:
        """Save a preset. It replaces one of the same name."""

    async def delete_preset(self, name: str) -> None: ...

    async def export(self, chat: ChatId, path: Path, form: ExportFormat) -> None:
        """Write the chat to a file. Raises ClientError if the file exists."""

    async def export_all(self, path: Path) -> int:
        """Write all chats that are not private to a JSON file, and return their number. Raises ClientError if the file
        exists.
        """

    def notices(self) -> AsyncGenerator[Notice, None]:
        """Yield notices of the store as they occur, such as damage, or that chats are no longer saved."""

    async def import_chats(self, path: Path) -> Sequence[ChatSummary]:
        """Import the chats of a JSON file that `export` or `export_all` wrote, as new chats."""


class Context(Protocol):
    """The context window of the model."""

    async def budget(self, chat: ChatId | None, leaf: MessageId | None, typed: str) -> ContextBudget:
        """Return the token budget of the branch that ends in `leaf`, plus a new message `typed`."""

    async def plan(self, chat: ChatId, leaf: MessageId | None, how: FullContext, typed: str) -> TrimPlan:
        """Plan which messages of the branch to leave out so that `typed` and a reply fit; all messages if necessary.

        Without `typed`, a question at the end of the branch is kept, because it still has to be answered.
        """

    async def trim(self, chat: ChatId, plan: TrimPlan) -> Chat:
        """Trim the messages that the plan selects, and return the changed chat.

        If the plan asks for a summary, the model writes it, which takes as long as a reply.
        """


class Engine(Protocol):
    """The engine, which serves this chat and all other clients."""

    def address(self) -> str:
        """Return the base URL for other programs, such as "http://127.0.0.1:4645/v1". Empty while the engine starts."""

    def default_sampling(self) -> Sampling | None:
        """Return the loaded model's recommended sampling. None: no model is loaded, or the server reports no values.

        A chat that leaves a parameter unset uses this value, or else the engine's default.
        """

    def loading(self, *, retry: bool = False) -> AsyncGenerator[Loading, None]:
        """Yield the progress of loading the current model, until it is loaded.

        With `retry`, a load that failed is tried again, and an engine that exited is started again.
        """

    async def is_ready(self) -> bool:
        """Whether the loaded model can answer now, without waiting for a load or a restart."""

    async def is_started_elsewhere(self) -> bool:
        """Whether the engine has exited, and another program has started one. `loading` with `retry` connects to it."""

    def loaded_models(self) -> AsyncGenerator[Loading, None]:
        """Yield the last state of each successful load, and one without a model when its engine has exited.

        Never ends. Contains the loads that no caller of `loading` follows, such as a restart for a request.
        """

    async def status(self) -> EngineStatus: ...

    async def abort(self, request: RequestId) -> None:
        """Abort a request of any client. Does nothing if the request has ended."""


class Models(Protocol):
    """Models on this machine, in the catalog, and on the Hub."""

    async def installed(self) -> Sequence[ModelInfo]: ...

    async def catalog(self) -> Sequence[ModelInfo]: ...

    def offline_reason(self) -> str:
        """Return the reason why no model can be downloaded: "offline mode is on (INGLE_OFFLINE)"; "" if they can be."""

    def endpoint(self) -> str:
        """Return the address of the endpoint that the user named, which manages its models itself; "" if none."""

    async def recommended(self) -> Recommendation | None:
        """Return a model better than the default one. None if a model is installed, or if the user chose one."""

    async def search(self, text: str) -> SearchResults:
        """Search the Hub for repositories by name. Without a connection, search the catalog instead."""

    async def variants(self, name: str) -> Sequence[ModelInfo]:
        """Return the quantizations that a repository contains. Those that fit best come first."""

    async def find(self, name: str) -> ModelInfo:
        """Return a model's local entry without using the network. Raises ClientError if no model can have this name."""

    async def free_disk(self) -> int | None:
        """Return the free bytes where models are stored, or None if unknown."""

    async def fit(self, name: str) -> Fit:
        """Return whether a model fits this machine after the current model is unloaded, and with which context length.

        Takes seconds. Downloads a few megabytes from the Hub if the model is not installed.
        """

    def pull(self, name: str) -> AsyncGenerator[Download, None]:
        """Download a model, or resume its partial download. The iterator ends when the model is installed. Closing it
        earlier pauses the download.

        If the engine is already downloading this model to load it, follow that download; the iterator then ends when
        the model is loaded. If it is paused, callers that wait for the model keep waiting. Raises NotLoaded if the
        model cannot be loaded, or if another caller pauses the download.
        """

    async def delete(self, name: str) -> None:
        """Delete a model from this machine, and any partial download of it."""

    async def waits_for_replies(self, name: str) -> bool:
        """Whether this model is loaded only when no reply is running, because the engine must be replaced."""

    def load(self, name: str) -> AsyncGenerator[Loading, None]:
        """Use this model for all later replies. The iterator ends when the model is loaded.

        If loading fails, the previous model is loaded again, and then ClientError is raised with the reason. Closing
        the iterator early also restores the previous model. A partial download is kept.
        """


class Preferences(Protocol):
    """Preferences of the user, stored for later runs."""

    async def save_theme(self, name: str) -> None:
        """Use this theme in later runs."""


class Client(Protocol):
    """All protocols in one object, which the screens receive."""

    @property
    def replies(self) -> Replies: ...
    @property
    def tools(self) -> Tools: ...
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
