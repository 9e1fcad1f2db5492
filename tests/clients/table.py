"""The table of clients, read from clients.toml."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.environments import Environment
from tests.clients.scripted_model import Call

FILE = Path(__file__).with_name("clients.toml")
SMOLLM2, SCRIPTED = "smollm2", "scripted"  # names of the servers


@dataclass(frozen=True)
class Client:
    """A row of the table: a client with its driver, its environment, and its server."""

    name: str
    title: str
    environment: Environment
    driver: str
    dialect: str
    server: str = SMOLLM2
    tool_server: str = ""  # server for the case "tool"; empty: the server of the other cases
    shown: Sequence[str] = ()  # packages whose versions the table shows; empty: all packages of the environment
    calls: Call | None = None  # tool call that the scripted model makes for this client
    reasons: Mapping[str, str] = field(default_factory=dict)  # known reason of each failing case

    def server_of(self, case: str) -> str:
        """Return the name of the server on which a case runs."""
        return self.tool_server if case == "tool" and self.tool_server else self.server


def read_clients(note: Path) -> Sequence[Client]:
    """Return all clients in the order of the file. `note` is the path of the file that agents' tools read."""
    content = tomllib.loads(FILE.read_text(encoding="utf-8").replace("{note}", str(note)))
    environments = {row["name"]: Environment(**row) for row in content["environment"]}
    return [_client(row, environments) for row in content["client"]]


def _client(row: Mapping[str, Any], environments: Mapping[str, Environment]) -> Client:
    calls = Call(**row["calls"]) if "calls" in row else None
    environment = environments[row.get("environment", row["name"])]
    return Client(**{**row, "environment": environment, "calls": calls})
