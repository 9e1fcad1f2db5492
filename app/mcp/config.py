"""mcp.json: the tool servers of the user, in the format that other MCP clients read.

    {"mcpServers": {"files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "/home/me"]},
                    "docs":  {"url": "https://example.org/mcp", "headers": {"Authorization": "Bearer ${DOCS_KEY}"}}}}

`servers` is accepted instead of `mcpServers` (VS Code). `${NAME}` and `${env:NAME}` in a string are replaced by the
environment variable NAME. A server with `"disabled": true` is listed and not started.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct, field

from app.errors import AppError
from app.settings.settings import config_file

MAX_BYTES = 1 << 20  # a larger mcp.json is refused

_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)\}")


class InvalidMCPConfig(AppError):
    """mcp.json cannot be read, or describes a server that cannot be started."""


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A server that runs as a child process and speaks over its standard input and output."""

    command: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None  # variables added to a minimal environment
    folder: str | None = None  # working directory; None: the current one


@dataclass(frozen=True, slots=True)
class HTTPServer:
    """A server with an address (the Streamable HTTP transport)."""

    url: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ServerSpec:
    name: str
    transport: StdioServer | HTTPServer
    is_enabled: bool = True


class _Server(Struct):
    command: str = ""
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str = ""
    headers: dict[str, str] = {}
    type: str = ""
    disabled: bool = False


class _File(Struct):
    mcp_servers: dict[str, _Server] = field(name="mcpServers", default_factory=dict)
    servers: dict[str, _Server] = field(default_factory=dict)


def mcp_config_file() -> Path:
    """Return the path of the user's mcp.json, whether or not it exists."""
    return config_file().with_name("mcp.json")


def read_mcp_config(path: Path, environment: Mapping[str, str]) -> list[ServerSpec]:
    """Return the servers in the order of the file at `path`; none if there is no such file.

    Raises InvalidMCPConfig.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise InvalidMCPConfig(f"{path} cannot be read: {problem.strerror}", "Check its permissions.") from problem
    if len(content) > MAX_BYTES:
        raise InvalidMCPConfig(f"{path} is larger than {MAX_BYTES:,} bytes", "Remove servers from it.")
    try:
        described = msgspec.convert(json.loads(content), _File)
    except (ValueError, RecursionError) as problem:  # msgspec's errors are ValueErrors
        raise InvalidMCPConfig(f"{path} is not valid: {problem}", "Correct the file.") from problem
    servers = {**described.servers, **described.mcp_servers}
    return [_spec(path, name, server, environment) for name, server in servers.items()]


def _spec(path: Path, name: str, server: _Server, environment: Mapping[str, str]) -> ServerSpec:
    def expand(text: str) -> str:
        return _VARIABLE.sub(lambda found: environment.get(found[1], ""), text)

    def expand_values(values: Mapping[str, str]) -> dict[str, str]:
        return {key: expand(value) for key, value in values.items()}

    transport: StdioServer | HTTPServer
    if server.command:
        arguments = tuple(map(expand, server.args))
        folder = None if server.cwd is None else expand(server.cwd)
        transport = StdioServer(expand(server.command), arguments, expand_values(server.env), folder)
    elif server.url.startswith(("http://", "https://")):
        transport = HTTPServer(expand(server.url), expand_values(server.headers))
    else:
        raise InvalidMCPConfig(
            f"{path}: the server {name!r} has neither a command nor an http(s) url", "Add one, or remove the server."
        )
    return ServerSpec(name, transport, not server.disabled)
