"""The model for a client, and the context of a new server."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.client.own_server import ServerModel
from app.connect.clients import find_client
from app.connect.model_choice import Candidate, NoSuitableModel, choose, of_files, of_server, shortcomings
from app.connect.serving import _flags
from app.progress import SilentProgress
from app.settings.settings import Settings, load_settings

PI = find_client("pi")  # needs tools and 8,192 tokens


def model(
    name: str, *, state: str = "unloaded", tools: str = "native", context: int = 32_768, size: int = 1
) -> ServerModel:
    return ServerModel(name, (name,), "chat", state, tools=tools, context_length=context, size=size)


@pytest.fixture
def settings(smollm2: Path, tmp_path: Path) -> Settings:
    """Settings of a user who has only the default model."""
    return replace(load_settings(), models_dir=smollm2.parent, state_dir=tmp_path, hub_cache=tmp_path / "hub")


def test_models_of_a_server_are_ordered_by_preference() -> None:
    models = [
        model("default"),
        model("small", size=1),
        model("large", size=9),
        model("loaded", state="loaded", size=2),
        ServerModel("embedder", ("embedder",), "embedding", "loaded"),
        ServerModel("broken", ("broken",), "chat", "unloaded", problem="a part of its file is missing", size=10),
    ]
    assert [one.name for one in of_server(models)] == ["loaded", "default", "large", "small"]


def test_first_model_that_suits_is_chosen(settings: Settings) -> None:
    models = [model("plain", tools="generic"), model("short", context=4096), model("good")]
    assert choose(PI, of_server(models), settings).name == "good"


def test_model_without_tools_suits_a_client_that_needs_none(settings: Settings) -> None:
    assert choose(find_client("llm"), of_server([model("plain", tools="none")]), settings).name == "plain"


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (Candidate("a", has_tools=False, context_length=99_999), "the chat template of a has no tools"),
        (Candidate("a", has_tools=True, context_length=4096), "a context of 4,096 tokens"),
    ],
)
def test_refusal_states_the_reason_and_a_model_to_download(settings: Settings, one: Candidate, reason: str) -> None:
    assert reason in shortcomings(PI, one)[0]
    with pytest.raises(NoSuitableModel, match=reason) as refused:
        choose(PI, [one], settings)
    assert refused.value.remedy.startswith("ingle pull ")


def test_stored_models_are_read_from_their_files(settings: Settings) -> None:
    first = next(of_files(settings))
    assert first == Candidate("smollm2:135m", has_tools=False, context_length=8192)


@pytest.mark.parametrize(
    ("name", "configured", "flags"),
    [
        ("aider", 0, {}),  # the model supports 8,192 tokens, which suffice
        ("aider", 2048, {"context": 8192}),
        ("claude", 0, {"context": 32_768}),
        ("claude", 65_536, {"context": 32_768}),
        ("llm", 2048, {}),
    ],
)
def test_context_of_a_new_server_is_raised_if_it_is_too_short(
    settings: Settings, name: str, configured: int, flags: dict[str, object]
) -> None:
    settings = replace(settings, context=configured)
    assert _flags(find_client(name), settings, SilentProgress()) == flags


def test_context_of_the_command_line_is_kept(settings: Settings) -> None:
    named = replace(settings, context=2048, origins={**settings.origins, "context": "--context"})
    assert _flags(find_client("claude"), named, SilentProgress()) == {"context": 2048}
