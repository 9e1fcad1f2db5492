"""OpenAI's list of models: the details of each model, its names, and its state."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from app.generation.template import ChatTemplateRenderer
from app.models.details import ModelDetails, ModelFacts
from app.models.residency.residents import Residents
from app.server.dialects.openai.models import ModelEndpoints
from app.server.http.errors import InvalidRequest
from app.server.model_names import GivenModel, ModelNames
from app.server.served_models import ServedModels
from app.text.tokenizer import Tokenizer
from quant.errors import ModelFileError
from tests.app.server.fixed_models import NoLoader
from tests.app.server.live_server import LiveServer, controlled_engine

NAME = "org/repo:Q4_K_M"
ALIASES = {"gpt-4o": NAME, "any": "*", "elsewhere": "org/other", "claude-*": "*", "o*": "org/other"}


def names(known: Sequence[str] = (), given: GivenModel | None = None, **aliases: str) -> ModelNames:
    """Return names of which `known` are of other stored models."""
    return ModelNames(
        [given or GivenModel(NAME, (NAME,))],
        aliases or ALIASES,
        lambda name: name if name in known else None,
        lambda: known,
    )


def served(describe: Callable[[str], ModelFacts] | None = None, known: Sequence[str] = ()) -> ServedModels:
    return ServedModels(Residents(NoLoader()), names(known), describe)


def get(models: ServedModels, path: str) -> Any:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Starlette(routes=ModelEndpoints(models).endpoints()))
        async with httpx.AsyncClient(transport=transport, base_url="http://ingle.test") as http:
            return await http.get(path)

    return asyncio.run(ask()).json()


def found(names: ModelNames, name: str | None) -> tuple[str, str]:
    """Return the key and the reply name of the model that a request names."""
    model = asyncio.run(names.find(name))
    return model.key, model.reply_name


def test_loaded_model_reports_its_context_under_each_name(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer(NAME, engine, tokenizer, renderer, aliases=ALIASES) as server:
        listed = httpx.get(f"{server.url}/v1/models", trust_env=False).json()
    assert [one["id"] for one in listed["data"]] == [NAME, "gpt-4o", "any"]
    for one in listed["data"]:
        assert one["context_length"] == one["max_model_len"] == one["meta"]["n_ctx"] == 2048
        assert (one["meta"]["n_vocab"], one["root"], one["object"]) == (tokenizer.vocab_size, NAME, "model")
        assert one["meta"]["n_params"] is None
        assert one["status"] == {"value": "loaded"}


def test_stored_models_are_listed_with_the_facts_of_their_files() -> None:
    def describe(key: str) -> ModelFacts:
        details = replace(ModelDetails.unknown(key), parameters=134_515_008, vocab_size=1000)
        return ModelFacts(details, context_length=4096)

    models = get(served(describe, ["org/other"]), "/v1/models")["data"]
    assert [one["id"] for one in models] == [NAME, "gpt-4o", "any", "org/other", "elsewhere"]
    for one in models:
        assert one["status"] == {"value": "unloaded"}
        assert one["meta"] == {"n_ctx": 4096, "n_vocab": 1000, "n_params": 134_515_008}


def test_model_with_unreadable_files_is_listed_by_its_name() -> None:
    def unreadable(key: str) -> ModelFacts:
        raise ModelFileError("the file was deleted")

    [one, *_] = get(served(unreadable), "/v1/models")["data"]
    assert (one["id"], one["meta"]["n_params"]) == (NAME, None)


def test_alias_with_a_star_matches_a_prefix() -> None:
    for name in ("claude-sonnet-4-5", "claude-haiku-4-5-20251001"):
        assert found(names(), name) == (NAME, name)
        assert get(served(), f"/v1/models/{name}")["root"] == NAME


def test_unknown_names_are_refused_with_the_names_of_the_server() -> None:
    for name in (NAME, "gpt-4o", "any"):
        assert found(names(), name) == (NAME, name)
    for name in ("elsewhere", "org/other", "*", "GPT-4o", "claude", "o3"):
        with pytest.raises(InvalidRequest) as refused:
            found(names(), name)
        assert refused.value.remedy == "This server has 'org/repo:Q4_K_M', 'gpt-4o', 'any'."
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_names_and_aliases_of_stored_models_are_found() -> None:
    for name in ("org/other", "elsewhere", "o3"):
        assert found(names(["org/other"]), name) == ("org/other", name)


def test_tag_latest_is_optional() -> None:
    assert found(names(), f"{NAME}:latest") == (NAME, NAME)
    assert found(names(["x:latest"]), "x:latest") == ("x:latest", "x:latest")


def test_request_without_a_name_means_the_default_model() -> None:
    for name in (None, ""):
        assert found(names(), name) == (NAME, NAME)


def test_addresses_of_stored_models_are_not_listed() -> None:
    address = "https://models.test/x.gguf#sha256=00"
    assert list(asyncio.run(names(["org/other", address]).listed())) == [NAME, "org/other"]


def test_path_of_the_model_is_never_listed() -> None:
    given = GivenModel("./x.gguf", ("x", "y"))
    chosen = names(given=given, **{"mine": "./x.gguf", "o": "y", "m*": "*"})
    assert asyncio.run(chosen.listed()) == {"./x.gguf": ["x", "y", "mine", "o"]}
    for asked, reported in (("./x.gguf", "x"), ("y", "y"), ("mine", "mine"), ("my-own", "my-own"), ("x", "x")):
        assert found(chosen, asked) == ("./x.gguf", reported)
    with pytest.raises(InvalidRequest, match="does not exist here"):
        found(chosen, "./y.gguf")


def test_paths_without_v1_list_the_same_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)  # the lists have the time of their endpoints
    models = served()
    for path in ("/models", "/models/gpt-4o"):
        assert get(models, path) == get(models, f"/v1{path}")
