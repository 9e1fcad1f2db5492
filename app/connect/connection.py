"""The facts about a server that a client must know, and the form of an entry in the table of clients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from app.connect.documents import Format, KeyPath
from app.settings.places import Places

Dialect: TypeAlias = Literal["anthropic", "responses", "chat", "ollama", "llama.cpp"]

KEY_VARIABLE = "INGLE_API_KEY"  # environment variable that gives a client the key of the server
NO_KEY = "none"  # for clients that require a key when the server needs none

# The path of the requests that each API uses for a reply.
REQUEST_PATHS: Mapping[Dialect, str] = {
    "anthropic": "/v1/messages",
    "responses": "/v1/responses",
    "chat": "/v1/chat/completions",
    "ollama": "/api/chat",
    "llama.cpp": "/v1/chat/completions",
}


@dataclass(frozen=True, slots=True)
class Connection:
    """The facts about a server that a client must know."""

    base_url: str  # without a path, such as "http://127.0.0.1:4645"
    model: str  # name in requests
    context_length: int  # in tokens
    has_tools: bool  # whether the chat template of the model supports tool calls
    key: str | None = None  # None: the server needs no key from programs of this user
    file: str | None = None  # the path that --model of a server needs if it is not the name

    @property
    def api_url(self) -> str:
        """The base URL of the APIs of OpenAI."""
        return f"{self.base_url}/v1"

    @property
    def sent_key(self) -> str:
        """The key for a client that always sends one."""
        return self.key or NO_KEY

    @property
    def output_tokens(self) -> int:
        """Limit of a reply in tokens, for clients that reserve it in the context."""
        return max(1, min(16_384, self.context_length // 4))


@dataclass(frozen=True, slots=True)
class Launch:
    """Environment, arguments, and files for one process of a client. Nothing remains when it has ended."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()  # before those of the user
    files: Mapping[str, str] = field(default_factory=dict)  # text by name, in a private temporary folder


@dataclass(frozen=True, slots=True)
class Target:
    """A settings file of a client, and the values that connect it to the server."""

    path: Path
    format: Format
    values: Mapping[KeyPath, object]
    is_private: bool = False  # whether a value is a key
    frame: Mapping[KeyPath, object] = field(default_factory=dict)  # values that every file of this kind has
    refreshed: tuple[str, ...] = ()  # members of the values that the client itself changes


@dataclass(frozen=True, slots=True)
class Setup:
    """The files and steps that connect a client to the server until they are undone."""

    targets: tuple[Target, ...]
    notes: tuple[str, ...] = ()  # what remains to be done by the user
    arguments: tuple[str, ...] = ()  # before those of the user, for clients that have other settings as well


Launcher: TypeAlias = Callable[[Connection, Path], Launch]  # the path is that of the private temporary folder


@dataclass(frozen=True, slots=True)
class Client:
    """A program that uses the server."""

    name: str  # in commands
    title: str
    dialect: Dialect
    programs: tuple[str, ...] = ()  # names of its executable, in the order of preference
    install: str = ""  # command that installs it; empty: none is known
    least_context: int = 8192  # tokens of its first prompt and a short reply
    advised_context: int = 32_768  # tokens for useful work
    needs_tools: bool = True
    launch: Launcher | None = None  # None: it reads its server from its settings only
    ask: tuple[str, ...] = ()  # arguments before a prompt that make it print one reply and exit; empty: it cannot
    setup: Callable[[Connection, Places], Setup] | None = None  # None: it has no settings files
    has_project_file: bool = False  # whether a folder of the user may have its settings
    steps: Callable[[Connection], tuple[str, ...]] | None = None  # for its settings screens; None: it has files

    @property
    def request_path(self) -> str:
        """The path of the requests by which it asks for replies."""
        return REQUEST_PATHS[self.dialect]
