"""The table of clients."""

import json
import tomllib
from pathlib import Path

import pytest

from app.connect.clients import CLIENTS, NoSuchClient, find_client
from app.connect.connection import Client, Connection, Launch

KEY = "key-of-the-user"
CONNECTION = Connection("http://127.0.0.1:4645", "org/model:Q4_K_M", 40_960, has_tools=True, key=KEY)
LAUNCHED = [client for client in CLIENTS if client.launch is not None]


def launch(client: Client, connection: Connection = CONNECTION) -> Launch:
    assert client.launch is not None
    return client.launch(connection, Path("/folder"))


def test_client_names_and_programs_are_unique() -> None:
    names = [word for client in CLIENTS for word in {client.name, *client.programs}]
    assert len(names) == len(set(names))


def test_client_is_found_by_its_program() -> None:
    assert find_client("zeditor") is find_client("zed")


def test_unknown_client_is_refused_with_the_known_names() -> None:
    with pytest.raises(NoSuchClient, match="nano") as refused:
        find_client("nano")
    assert "claude" in refused.value.remedy


@pytest.mark.parametrize("client", LAUNCHED, ids=lambda client: client.name)
def test_launch_has_address_model_and_key(client: Client) -> None:
    given = launch(client)
    everything = json.dumps([*given.environment.values(), *given.arguments, *given.files.values()])
    assert "127.0.0.1:4645" in everything
    assert "org/model:Q4_K_M" in everything
    assert KEY in json.dumps([*given.environment.values(), *given.files.values()])


@pytest.mark.parametrize("client", LAUNCHED, ids=lambda client: client.name)
def test_arguments_contain_no_key(client: Client) -> None:
    """Other users can read the arguments of a process."""
    assert KEY not in " ".join(launch(client).arguments)


def test_overrides_of_codex_are_toml() -> None:
    words = launch(find_client("codex")).arguments
    values = tomllib.loads("\n".join(word for word in words if word != "-c"))
    assert values["model"] == "org/model:Q4_K_M"
    assert values["model_providers"]["ingle"]["base_url"] == "http://127.0.0.1:4645/v1"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_reply_leaves_most_of_a_short_context_to_the_prompt(client: Client) -> None:
    connection = Connection("http://127.0.0.1:4645", "m", client.least_context, has_tools=True)
    assert connection.output_tokens <= client.least_context // 4
