"""OpenAI's list of models: the details of the served model, and its aliases."""

import asyncio
from dataclasses import replace

import httpx
import pytest
from starlette.applications import Starlette

from app.models.details import ModelDetails
from app.server.dialects.openai.models import ModelEndpoints
from app.server.http.errors import InvalidRequest
from app.server.served_model import ServedModel
from quant.errors import ModelFileError

NAME = "org/repo:Q4_K_M"
ALIASES = {"gpt-4o": NAME, "any": "*", "elsewhere": "org/other", "claude-*": "*", "o*": "org/other"}


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel(NAME, 4096, 1000, ALIASES)


async def _get(model: ServedModel, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(Starlette(routes=ModelEndpoints(model).endpoints()))
    async with httpx.AsyncClient(transport=transport, base_url="http://ingle.test") as http:
        return await http.get(path)


def test_each_name_reports_the_context_length(model: ServedModel) -> None:
    listed = asyncio.run(_get(model, "/v1/models")).json()
    assert [one["id"] for one in listed["data"]] == [NAME, "gpt-4o", "any"]
    for one in listed["data"]:
        assert one["context_length"] == one["max_model_len"] == one["meta"]["n_ctx"] == 4096
        assert (one["meta"]["n_vocab"], one["root"], one["object"]) == (1000, NAME, "model")
        assert one["meta"]["n_params"] is None
        assert asyncio.run(_get(model, f"/v1/models/{one['id']}")).json() == one


def test_number_of_parameters_is_read_from_the_files() -> None:
    def unreadable() -> ModelDetails:
        raise ModelFileError("the file was deleted")

    known = replace(ModelDetails.unknown(NAME), parameters=134_515_008)
    for describe, parameters in ((lambda: known, 134_515_008), (unreadable, None)):
        [one] = asyncio.run(_get(ServedModel(NAME, 4096, 1000, {}, describe), "/v1/models")).json()["data"]
        assert one["meta"]["n_params"] == parameters


def test_alias_with_a_star_matches_a_prefix(model: ServedModel) -> None:
    for name in ("claude-sonnet-4-5", "claude-haiku-4-5-20251001"):
        model.check(name)
        assert asyncio.run(_get(model, f"/v1/models/{name}")).json()["root"] == NAME


def test_unknown_names_are_refused_with_the_served_names(model: ServedModel) -> None:
    for name in (NAME, "gpt-4o", "any"):
        model.check(name)
    for name in ("elsewhere", "org/other", "*", "GPT-4o", "claude", "o3"):
        with pytest.raises(InvalidRequest) as refused:
            model.check(name)
        assert refused.value.remedy == "This server has 'org/repo:Q4_K_M', 'gpt-4o', 'any'."
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_request_without_a_name_means_the_served_model(model: ServedModel) -> None:
    for name in (None, ""):
        model.check(name)
        assert model.reply_name(name) == NAME
    assert model.reply_name("gpt-4o") == "gpt-4o"


def test_path_of_the_model_is_never_listed() -> None:
    served = ServedModel(
        "x", 4096, 1000, {"mine": "./x.gguf", "o": "y", "m*": "*"}, other_names=["y", "x"], loaded_as="./x.gguf"
    )
    assert served.names == ("x", "y", "mine", "o")
    for asked, reported in (("./x.gguf", "x"), ("y", "y"), ("mine", "mine"), ("my-own", "my-own"), ("x", "x")):
        assert served.reply_name(asked) == reported
    with pytest.raises(InvalidRequest, match="does not exist here"):
        served.reply_name("./y.gguf")


def test_paths_without_v1_list_the_same_models(model: ServedModel) -> None:
    for path in ("/models", "/models/gpt-4o"):
        assert asyncio.run(_get(model, path)).json() == asyncio.run(_get(model, f"/v1{path}")).json()
