"""Model lists and details through the real ollama client."""

import asyncio
from pathlib import Path

import httpx
import ollama
import pytest

from app.generation.template import ChatTemplateRenderer
from app.models.details import ModelDetails, ModelFacts, details_of
from app.models.residency.residents import Residents
from app.models.store import ModelStore
from app.server.model_names import GivenModel, ModelNames
from app.server.served_models import ServedModels
from app.settings.settings import load_settings
from app.text.tokenizer import Tokenizer
from tests.app.server.dialects.ollama.real_client import client
from tests.app.server.fixed_models import NoLoader
from tests.app.server.live_server import LiveServer, controlled_engine


@pytest.fixture(scope="module")
def details(smollm2: Path, renderer: ChatTemplateRenderer) -> ModelDetails:
    store = ModelStore(load_settings())
    return details_of(store.resolve(str(smollm2)), store.catalog, store.hub_models, renderer)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, renderer: ChatTemplateRenderer, details: ModelDetails) -> LiveServer:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    return LiveServer("smollm2:135m", engine, tokenizer, renderer, aliases={"gpt-4o": "*"}, describe=lambda: details)


def test_model_is_described_by_its_file(server: LiveServer) -> None:
    with server, client(server) as api:
        shown, listed, running = api.show("smollm2:135m"), api.list(), api.ps()
    assert shown.details is not None
    assert (shown.details.family, shown.details.format) == ("llama", "gguf")
    assert (shown.details.parameter_size, shown.details.quantization_level) == ("134.52M", "Q4_1")
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == 2048  # the context length of the server, not that of the model
    assert shown.capabilities == ["completion", "tools", "generic_tools"]
    assert shown.template == server.service.tokenizer.chat_template
    assert shown.parameters == "num_ctx 2048"
    assert [model.model for model in listed.models] == ["smollm2:135m", "gpt-4o"]
    assert listed.models[0].size == listed.models[1].size
    assert (running.models[0].name, running.models[0].context_length) == ("smollm2:135m", 2048)


def test_other_models_are_unknown_and_the_tag_is_optional(hash_server: LiveServer) -> None:
    with client(hash_server) as api:
        assert api.show("hash:latest").capabilities == ["completion", "tools", "generic_tools"]
        with pytest.raises(ollama.ResponseError, match="'other' does not exist here") as refused:
            api.show("other")
    assert refused.value.status_code == 404
    unnamed = httpx.post(f"{hash_server.url}/api/show", json={}, trust_env=False)
    assert (unnamed.status_code, unnamed.json()) == (400, {"error": "model: it is required."})


def test_model_details_are_read_once() -> None:
    asked: list[str] = []

    def describe(key: str) -> ModelFacts:
        asked.append(key)
        return ModelFacts(ModelDetails.unknown(key))

    async def describe_twice() -> None:
        models = ServedModels(Residents(NoLoader()), ModelNames([GivenModel("m", ("m",))]), describe)
        assert not asked
        first, second = await models.describe("m"), await models.describe(None)
        assert first.details is second.details

    asyncio.run(describe_twice())
    assert asked == ["m"]
