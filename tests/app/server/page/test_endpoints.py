"""The page for browsers, its headers and files, its access rules, and the recent replies."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.cli import COMMANDS
from app.connect.clients import CLIENTS
from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy
from app.server.http.access import Authenticator
from app.server.page import endpoints
from app.server.page.endpoints import FILES, HEADERS
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.support.processes import until

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MAX_BYTES = 100_000
FIRST, SECOND = "sk-first", "sk-second"
WORDS = "the wording of a private prompt"


@pytest.fixture(scope="module")
def locked(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[LiveServer]:
    """A server with two keys."""
    engine, _ = controlled_engine(tokenizer.vocab_size)
    policy = AccessPolicy(Authenticator([FIRST, SECOND]))
    with LiveServer("hash", engine, tokenizer, renderer, policy=policy) as server:
        yield server


def client(server: LiveServer, key: str | None = None, **headers: str) -> httpx.Client:
    sent = {**headers, **({} if key is None else {"authorization": f"Bearer {key}"})}
    return httpx.Client(base_url=server.url, headers=sent, trust_env=False, timeout=60)


def ask(http: httpx.Client, content: str = "Hi", **fields: Any) -> httpx.Response:
    body = {"model": "hash", "messages": [{"role": "user", "content": content}], "max_tokens": 4, "ignore_eos": True}
    return http.post("/v1/chat/completions", json={**body, **fields})


def test_accept_header_decides_between_page_and_greeting(hash_server: LiveServer) -> None:
    with client(hash_server) as http:
        page = http.get("/", headers=BROWSER)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.text.startswith("<!doctype html>")
        for accepted in ("*/*", "application/json", "text/plain", ""):
            answer = http.get("/", headers={"accept": accepted})
            assert answer.text == "Ollama is running"
            assert answer.headers["content-type"] == "text/plain; charset=utf-8"
            assert answer.headers["vary"] == "accept"


def test_every_file_has_the_headers_and_all_are_small(hash_server: LiveServer) -> None:
    with client(hash_server) as http:
        answers = [http.get("/", headers=BROWSER), *(http.get(f"/inglenook/page/{name}") for name in FILES)]
    for answer in answers:
        assert answer.status_code == 200
        assert HEADERS.items() <= dict(answer.headers).items()
    assert sum(len(answer.content) for answer in answers[1:]) < MAX_BYTES


def test_policy_allows_only_files_of_the_server() -> None:
    policy = dict(part.split(" ", 1) for part in HEADERS["content-security-policy"].split("; "))
    sources = {name: value for name, value in policy.items() if name.endswith("-src")}
    assert set(sources.values()) == {"'none'", "'self'"}
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_page_has_no_inline_scripts_styles_or_foreign_addresses() -> None:
    folder = Path(endpoints.__file__).parent
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)
    for name in FILES:
        text = (folder / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://(?!\$)\w", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name


def test_other_names_are_not_files_of_the_page(hash_server: LiveServer) -> None:
    with client(hash_server) as http:
        for name in ("none.js", "endpoints.py", "__init__.py", "..%2Fendpoints.py", "../endpoints.py", ""):
            assert http.get(f"/inglenook/page/{name}").status_code == 404, name


def test_page_needs_no_key_but_its_data_does(locked: LiveServer) -> None:
    with client(locked) as http:
        assert http.get("/", headers=BROWSER).status_code == 200
        assert {http.get(f"/inglenook/page/{name}").status_code for name in FILES} == {200}
        assert http.post("/inglenook/page/page.js").status_code == 401
        for path in ("replies", "models", "engine"):
            assert http.get(f"/inglenook/{path}").status_code == 401
    with client(locked, FIRST) as http:
        for path in ("replies", "models", "engine"):
            assert http.get(f"/inglenook/{path}").status_code == 200


def test_posts_are_accepted_from_the_page_and_refused_from_others(hash_server: LiveServer) -> None:
    with client(hash_server) as http:
        for origin, site, status in (
            (hash_server.url, "same-origin", 404),  # accepted: the model does not exist
            ("http://evil.test", "cross-site", 403),
            ("null", "cross-site", 403),
            (hash_server.url.replace("127.0.0.1", "localhost"), "cross-site", 403),
        ):
            headers = {"origin": origin, "sec-fetch-site": site}
            for path in ("/inglenook/load", "/inglenook/unload"):
                assert http.post(path, json={"model": "none"}, headers=headers).status_code == status


def test_states_do_not_change_by_get(hash_server: LiveServer) -> None:
    with client(hash_server) as http:
        for path in ("load", "unload", "stop", "abort"):
            assert http.get(f"/inglenook/{path}", params={"model": "hash"}).status_code == 405


def test_recent_replies_report_the_cache_without_text(locked: LiveServer) -> None:
    with client(locked, FIRST, **{"user-agent": "editor/9"}) as http:
        content = f"{WORDS} " * 20
        assert ask(http, content).status_code == 200
        assert ask(http, f"{content} and more").status_code == 200
        answer = http.get("/inglenook/replies")
    assert "wording" not in answer.text
    second, first = answer.json()["replies"]
    assert first["client"] == "editor/9"
    assert first["miss"] == "first_time"
    assert first["device_tokens"] == 0
    assert first["computed_tokens"] == first["prompt_tokens"]
    assert second["device_tokens"] > 0
    assert second["device_tokens"] + second["computed_tokens"] == second["prompt_tokens"]
    assert (second["reply_tokens"], second["outcome"]) == (4, "")
    assert 0 < second["first_token_seconds"] <= second["seconds"]


def test_key_sees_only_its_recent_replies(locked: LiveServer) -> None:
    with client(locked, SECOND, **{"user-agent": "second"}) as http:
        ask(http)
        assert {one["client"] for one in http.get("/inglenook/replies").json()["replies"]} == {"second"}
    with client(locked, FIRST) as http:
        assert "second" in {one["client"] for one in http.get("/inglenook/replies").json()["replies"]}


def test_reply_that_the_client_ends_is_reported(locked: LiveServer) -> None:
    with client(locked, SECOND) as http:
        with http.stream("POST", "/v1/chat/completions", json={
            "model": "hash", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 1900,
            "ignore_eos": True,
        }) as reply:  # fmt: skip
            next(reply.iter_lines())
        until(lambda: http.get("/inglenook/replies").json()["replies"][0]["outcome"] == "ended by the client")


def test_recent_replies_are_bounded(hash_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with client(hash_server) as http:
        for _ in range(60):
            ask(http, max_tokens=1)
        assert len(http.get("/inglenook/replies").json()["replies"]) == 50


def test_clients_are_those_of_the_commands(hash_server: LiveServer) -> None:
    with client(hash_server) as http:
        listed = http.get("/inglenook/clients").json()["clients"]
    assert [one["name"] for one in listed] == [one.name for one in CLIENTS]
    assert {one["name"] for one in listed if one["launches"]} == {one.name for one in CLIENTS if one.launch}
    assert {"with", "connect", "disconnect"} <= COMMANDS.keys()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_enough_contrast(dark: bool) -> None:
    style = (Path(endpoints.__file__).parent / "page.css").read_text(encoding="utf-8")
    light, _, rest = style.partition("@media (prefers-color-scheme: dark)")
    colors = dict(re.findall(r"--([\w-]+): (#\w{6});", rest if dark else light))
    for ground in ("background", "surface", "panel"):
        for text in ("text", "quiet", "primary", "good", "bad", "third"):
            if (ground, text) != ("panel", "good"):  # chips are on the surface only
                assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
    assert contrast(colors["on-primary"], colors["primary"]) >= 4.5
    assert contrast(colors["edge"], colors["surface"]) >= 3  # borders of controls


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colors, as WCAG defines it."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(color: str) -> float:
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
