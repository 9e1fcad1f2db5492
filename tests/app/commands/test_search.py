"""`ingle search`: results from a fake hub and their order, and the search without a hub."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.cli import ingle
from app.errors import EXIT_USAGE, AppError
from app.models import hub_search
from app.models.families import load_families
from tests.app.models.checkpoint_folder import whole_files
from tests.app.models.fake_hub import FakeHub, serve

MEMORY = 5000
Search = Callable[..., Result]


def gguf(**sizes: int) -> dict[str, bytes]:
    """Return the files of a GGUF repository by name."""
    return {f"model-{kind}.gguf": bytes(size) for kind, size in sizes.items()}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """Repositories of the fake hub, from the least to the most downloaded."""
    with serve() as served:
        served.repositories = {
            "org/Small-Chat-GGUF": gguf(Q8_0=4000, Q4_K_M=2500, Q2_K=900),
            "org/Small-Chat-AWQ": whole_files(),
            "org/Large-Chat-GGUF": gguf(Q8_0=9000, Q4_K_M=6000),
            "org/Middle-Chat-GGUF": gguf(Q8_0=7000, Q4_K_M=5000, Q3_K_M=4000),
            "org/Chat-pickles-GGUF": {"pytorch_model.bin": bytes(100)},
            "org/Other-GGUF": gguf(Q8_0=100),
        }
        served.tags = {"org/Small-Chat-AWQ": "awq"}
        yield served


@pytest.fixture
def search(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Search:
    monkeypatch.setattr(hub_search, "machine_memory", lambda settings: MEMORY)
    places = {f"INGLE_{name}": str(tmp_path / name) for name in ("MODELS_DIR", "OLLAMA_DIR", "LMSTUDIO_DIR")}
    environment = {**places, "INGLE_HUB_ENDPOINT": hub.address, "INGLE_HUB_CACHE": str(tmp_path / "hub")}

    def run(*words: str, **more: str) -> Result:
        return CliRunner().invoke(ingle, ["search", *words], env={**environment, **more})

    return run


def test_models_that_fit_come_first_with_their_quantization(search: Search) -> None:
    found = json.loads(search("chat", "--json").stdout)
    assert [(it["name"], it["format"], it["fits"]) for it in found] == [
        ("org/Middle-Chat-GGUF:Q3_K_M", "gguf", True),
        ("org/Small-Chat-AWQ", "awq", True),
        ("org/Small-Chat-GGUF:Q4_K_M", "gguf", True),
        ("org/Large-Chat-GGUF:Q4_K_M", "gguf", False),
    ]
    by_name = {it["name"]: it for it in found}
    assert by_name["org/Small-Chat-GGUF:Q4_K_M"]["size"] == 2500
    assert by_name["org/Large-Chat-GGUF:Q4_K_M"]["fits"] is False
    assert {it["license"] for it in found} == {"mit"}
    assert "org/Chat-pickles-GGUF" not in str(found)


def test_memory_option_changes_what_fits(search: Search) -> None:
    found = json.loads(search("large", "--json", "--memory", "0.00001GB").stdout)
    assert [(it["name"], it["fits"]) for it in found] == [("org/Large-Chat-GGUF:Q4_K_M", True)]
    wrong = search("large", "--memory", "8")
    assert wrong.exit_code == EXIT_USAGE
    assert "must be a size like 8GB" in wrong.stderr
    offline = json.loads(search("qwen3", "--json", "--memory", "1GB", INGLE_OFFLINE="1").stdout)
    assert {it["fits"] for it in offline} == {True, False}


def test_results_are_printed_as_a_table(search: Search) -> None:
    lines = [line.split() for line in search("small", "chat").stdout.splitlines()]
    assert lines[0] == ["NAME", "FORMAT", "SIZE", "FITS", "DOWNLOADS", "LICENSE"]
    assert ["org/Small-Chat-GGUF:Q4_K_M", "gguf", "2.5", "kB", "yes", "0", "mit"] in lines


def test_format_and_limit_restrict_results(search: Search) -> None:
    assert [it["format"] for it in json.loads(search("chat", "--format", "awq", "--json").stdout)] == ["awq"]
    # the third repository has no file that can run
    assert len(json.loads(search("chat", "--limit", "3", "--json").stdout)) == 2


def test_no_results_exit_with_3(search: Search) -> None:
    answer = search("no such thing")
    assert (answer.exit_code, answer.stdout) == (3, "")
    assert json.loads(search("no such thing", "--json").stdout) == []


@pytest.mark.parametrize("more", [{"INGLE_OFFLINE": "1"}, {"INGLE_HUB_ENDPOINT": "http://127.0.0.1:9"}])
def test_models_with_short_names_are_searched_without_the_hub(
    search: Search, hub: FakeHub, more: dict[str, str]
) -> None:
    answer = search("qwen", "coder", "--json", **more)
    assert "models with a short name" in answer.stderr
    names = [it["name"] for it in json.loads(answer.stdout)]
    assert set(names) == {model.name for model in load_families() if re.match(r"qwen[\d.]+-coder[:-]", model.name)}
    assert names[0] == "qwen2.5-coder:0.5b"  # no model fits, so the smallest comes first
    assert hub.requests == []


def test_default_model_is_found_without_the_hub(search: Search) -> None:
    (found,) = json.loads(search("135m", "--json", INGLE_OFFLINE="1").stdout)
    assert (found["name"], found["quantization"], found["size"]) == ("smollm2:135m", "Q4_1", 98_362_432)
    assert "smollm2:135m" in search("smollm2", INGLE_OFFLINE="1").stdout


@pytest.mark.parametrize(
    "listing", [b"{}", b"[", b'[{"id": "../../x", "downloads": 1}, {"id": 3}, {"id": "org/x:Q4_0", "downloads": 1}, 7]']
)
def test_invalid_hub_response_gives_no_results(search: Search, hub: FakeHub, listing: bytes) -> None:
    hub.listing = listing
    answer = search("chat", "--json")
    if listing.endswith(b"]"):
        assert (answer.exit_code, json.loads(answer.stdout)) == (3, [])
    else:
        assert isinstance(answer.exception, AppError)
