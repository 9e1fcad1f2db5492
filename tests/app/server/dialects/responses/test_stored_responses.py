"""Stored responses: size limit, access, and persistence. A failure to store never fails the reply."""

import asyncio
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy
from app.server.dialects.responses.stored_responses import FILE_NAME, ROW_BYTES, StoredResponse, StoredResponses
from app.server.http.access import Authenticator
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import LiveServer, controlled_engine

RESPONSES = "/v1/responses"


def response(name: str, previous: str | None = None, *, owner: str = "", size: int = 10) -> StoredResponse:
    return StoredResponse(name, owner, previous, os.urandom(size), b"[]")


@contextmanager
def opened(folder: Path | None, max_bytes: int = 1 << 20) -> Iterator[StoredResponses]:
    stored = StoredResponses(folder, max_bytes=max_bytes)
    yield stored
    stored.close()


async def put(stored: StoredResponses, responses: Sequence[StoredResponse]) -> None:
    for one in responses:
        await stored.put(one)


def test_chain_survives_a_restart_for_its_owner_only(tmp_path: Path) -> None:
    chain = [response("a"), response("b", "a"), response("c", "b")]
    with opened(tmp_path / "state") as stored:
        asyncio.run(put(stored, chain))
    with opened(tmp_path / "state") as stored:
        assert asyncio.run(stored.chain("c", "")) == chain
        assert asyncio.run(stored.get("b", "")) == chain[1]
        assert asyncio.run(stored.chain("c", "another")) == []
        assert asyncio.run(stored.get("b", "another")) is None
        assert not asyncio.run(stored.delete("b", "another"))
        assert asyncio.run(stored.delete("b", ""))
        assert asyncio.run(stored.chain("c", "")) == chain[2:]


def test_file_is_private_and_deleted_responses_are_gone(tmp_path: Path) -> None:
    secret = response("a", size=64)
    with opened(tmp_path / "state") as stored:
        asyncio.run(put(stored, [secret, response("b")]))
        files = list((tmp_path / "state").iterdir())
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
        assert any(secret.body in file.read_bytes() for file in files)
        asyncio.run(stored.delete("a", ""))
        assert not any(secret.body in file.read_bytes() for file in files)


@pytest.mark.parametrize("in_memory", [True, False])
def test_least_recently_used_response_is_deleted_first(tmp_path: Path, in_memory: bool) -> None:
    with opened(None if in_memory else tmp_path, max_bytes=3 * (ROW_BYTES + 100)) as stored:
        asyncio.run(put(stored, [response("a"), response("b"), response("c", "a")]))
        # reading the chain also counts as a use of response "a", which "c" continues
        asyncio.run(stored.chain("c", ""))
        asyncio.run(put(stored, [response("d")]))
        kept = [asyncio.run(stored.get(name, "")) for name in "abcd"]
        assert [one is not None for one in kept] == [True, False, True, True]


def test_foreign_file_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"a text of somebody's" * 100)
    with opened(tmp_path) as stored:
        asyncio.run(put(stored, [response("a")]))
        assert asyncio.run(stored.chain("a", "")) == []
    assert (tmp_path / FILE_NAME).read_bytes().startswith(b"a text of somebody's")


def test_store_false_writes_nothing_and_keys_see_only_their_own(
    tmp_path: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> None:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    asked = {"model": "hash", "input": "A secret", "max_output_tokens": 2}
    policy = AccessPolicy(Authenticator(["one", "two"]))
    with (
        LiveServer("hash", engine, tokenizer, renderer, policy=policy, state_dir=tmp_path) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=None) as http,  # noqa: S113
    ):

        def post(key: str, **fields: object) -> httpx.Response:
            return http.post(RESPONSES, json={**asked, **fields}, headers={"x-api-key": key})

        assert post("one", store=False).status_code == 200
        assert list(tmp_path.iterdir()) == []
        for owner, other in (("one", "two"), ("two", "one")):
            stored = post(owner).json()["id"]
            assert any(b"A secret" in file.read_bytes() for file in tmp_path.iterdir())
            read = [http.get(f"{RESPONSES}/{stored}", headers={"x-api-key": key}) for key in (owner, other)]
            assert [answer.status_code for answer in read] == [200, 404]
            assert [post(key, previous_response_id=stored).status_code for key in (owner, other)] == [200, 400]
