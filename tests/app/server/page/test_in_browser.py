"""The page in a real browser: models, a chat, hostile text, the keyboard, narrow windows, and keys.

Needs Chromium (`apt-get install chromium`). Without it, `conftest.py` leaves these tests out.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import httpx
import pytest

from app.cli import COMMANDS
from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy
from app.server.http.access import Authenticator
from app.text.tokenizer import Tokenizer
from engine.kv.parked_cache import ParkedCache
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.loading_server import LoadingServer
from tests.app.server.scripted_server import ScriptedServer
from tests.app.server.served_application import ServedApplication
from tests.support.browser import Browser, Page, running_browser

Opened: TypeAlias = Callable[..., AbstractContextManager[Page]]

KEY = "sk-of-the-browser"
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\">\n\n</script><script>document.title='owned'</script>\n\n"
    "[script](javascript:document.title='owned') [spaced]( JaVaScRiPt:alert(1)) "
    "[data](data:text/html,<script>1</script>)\n\n"
    '[good](https://example.test/?a=1&b=2) <https://example.test/"onmouseover="alert(1)>\n\n'
    "```html\n</code></pre><img src=x onerror=alert(1)>\n```\n\n"
    "| <b>a</b> | b |\n|---|---|\n| [x](vbscript:a) | `<i>` |\n"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def opened(browser: Browser) -> Opened:
    """Return a function that opens the page of a server. The page must log no errors."""

    @contextmanager
    def open_page(server: ServedApplication, **options: Any) -> Iterator[Page]:
        with browser.page(**options) as page:
            page.open(f"{server.url}/")
            page.until("!document.getElementById('content').hidden || !document.getElementById('key').hidden")
            yield page
            assert page.errors == []

    return open_page


def poll(page: Page) -> None:
    """Make the page poll now."""
    page.run("void document.dispatchEvent(new Event('server-changed'))")


def state(name: str) -> str:
    """Return a script that reads the state of a model in the list."""
    return f"document.querySelector('[data-model={name}] .chip')?.textContent"


def action(name: str) -> str:
    return f"[data-model={name}] button"


def send(page: Page, text: str) -> None:
    page.click("#message")
    page.type(text)
    page.press("Enter")


def reply_ends(page: Page) -> None:
    page.until("document.querySelector('.reply') !== null && document.querySelector('[aria-busy]') === null")


def test_models_are_loaded_and_unloaded_by_clicks(opened: Opened, loading_server: LoadingServer) -> None:
    with opened(loading_server) as page:
        page.until(f"{state('a')} === '○ Stored' && {state('b')} === '○ Stored'")
        with loading_server.loader.held():
            page.click(action("b"))
            page.until(f"{state('b')}?.startsWith('◐ Loading')")
            loading_server.loader.parts = 4
            page.until(f"{state('b')} === '◐ Loading 40 %'")
            assert page.run("document.querySelector('[data-model=b] progress').value") == 0.4
        page.until(f"{state('b')} === '● Loaded'")
        assert loading_server.loader.loads == ["b"]
        page.until("document.getElementById('memory').textContent.includes('40 B promised to models')")
        page.click(action("b"))
        page.until(f"{state('b')} === '○ Stored'")
        loading_server.residents.of("b").parked = cast(ParkedCache, SimpleNamespace(num_bytes=7))
        poll(page)
        page.until("document.getElementById('memory').textContent.includes('b parked7 B7 B')")
        assert "parked cache 7 B" in page.text()


def test_load_is_canceled_and_its_failure_is_shown(opened: Opened, loading_server: LoadingServer) -> None:
    with opened(loading_server) as page:
        with loading_server.loader.held():
            page.click(action("b"))
            page.until(f"{state('b')}?.startsWith('◐ Loading')")
            page.click(action("b"))
            page.until(f"{state('b')} === '○ Stored'")
        loading_server.loader.sizes["b"] = 101
        page.click(action("b"))
        page.until(f"{state('b')} === '✕ Failed'")
        assert "needs 101 B" in page.run("document.querySelector('[data-model=b] .error').textContent")
        page.errors.clear()  # the browser logs the status 400


def test_turn_is_streamed_with_its_cost(opened: Opened, scripted_server: ScriptedServer) -> None:
    scripted_server.says("# Title\n\nSome **bold** text.\n\n- one\n- two\n\n```python\nprint(1)\n```")
    with opened(scripted_server) as page:
        with scripted_server.runner.held() as steps:
            send(page, "Hello")
            for _ in range(6):
                steps.release()
            page.until("document.querySelector('.markdown h4') !== null")
            assert page.run("document.querySelector('.markdown pre')") is None
            assert page.run("document.getElementById('stop').hidden") is False
        reply_ends(page)
        shown = page.run("document.querySelector('.markdown').innerHTML")
        assert "<h4>Title</h4><p>Some <strong>bold</strong> text.</p><ul><li>one</li><li>two</li></ul>" in shown
        assert page.run("document.querySelector('.markdown pre').textContent") == "print(1)"
        cost = page.run("document.querySelector('.cost').textContent")
        assert "prompt tokens, " in cost
        assert "tokens/s" in cost
        live = page.run("document.getElementById('live').textContent")
        assert live.index("Title") < live.index("Some bold text.") < live.index("prompt tokens")
        page.until("document.querySelector('.replies tbody')?.textContent.includes('web browser')")


def test_second_message_continues_the_conversation(opened: Opened, scripted_server: ScriptedServer) -> None:
    scripted_server.says("Fine.")
    with opened(scripted_server) as page:
        send(page, "First, a message that fills more than one block of the cache, so that it is found again later.")
        reply_ends(page)
        send(page, "Second")
        page.until("document.querySelectorAll('.reply .cost').length === 2")
        reply_ends(page)
        cached = page.run("document.querySelectorAll('.cost')[1].textContent")
        assert ", 0 cached" not in cached
        page.click("#new-chat")
        assert page.run("document.getElementById('turns').childElementCount") == 0


def test_running_reply_is_stopped_and_reports_its_cost(opened: Opened, scripted_server: ScriptedServer) -> None:
    scripted_server.says("word " * 400)
    with opened(scripted_server) as page, scripted_server.runner.held() as steps:
        send(page, "Hello")
        for _ in range(5):
            steps.release()
        page.until("document.querySelector('.markdown')?.textContent.startsWith('word')")
        page.click("#stop")
        page.until("document.querySelector('[aria-busy]') === null")
        assert "reply tokens" in page.run("document.querySelector('.cost').textContent")
        assert page.run("document.querySelector('.markdown').textContent.length") < 200
        assert page.run("document.getElementById('send').hidden") is False


def test_hostile_text_of_a_model_stays_text(opened: Opened, scripted_server: ScriptedServer) -> None:
    scripted_server.says(HOSTILE)
    with opened(scripted_server) as page:
        send(page, "Attack")
        reply_ends(page)
        assert page.run("document.title") == "Inglenook"
        inside = "document.querySelector('.markdown')"
        tags = page.run(f"[...new Set([...{inside}.querySelectorAll('*')].map((one) => one.tagName.toLowerCase()))]")
        assert not {"img", "script", "iframe", "b", "i", "object", "svg"} & set(tags)
        links = page.run(f"[...{inside}.querySelectorAll('a')].map((one) => one.href)")
        assert links
        assert all(link.startswith("https://example.test/") for link in links)
        attributes = page.run(f"[...{inside}.querySelectorAll('*')].flatMap((one) => one.getAttributeNames())")
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "style", "srcdoc")]
        shown = page.run(f"{inside}.textContent")
        for part in (
            "<img src=x onerror=",
            "</script><script>",
            "javascript:document.title",
            "</code></pre>",
            "<b>a</b>",
        ):
            assert part in shown


def test_page_is_usable_by_keyboard_alone(opened: Opened, scripted_server: ScriptedServer) -> None:
    scripted_server.says("Fine.")
    with opened(scripted_server) as page:
        page.until("document.querySelector('#model option') !== null")
        page.press("Tab")
        assert page.run("document.activeElement.className") == "skip"
        page.press("Enter")
        assert page.run("document.activeElement.id") == "try"
        page.press("Tab")
        assert page.run("document.activeElement.id") == "message"
        assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.type("Hello")
        page.press("Enter")
        reply_ends(page)
        assert page.run("document.activeElement.id") == "message"
        while page.run("document.activeElement.role") != "tab":
            page.press("Tab")
        page.press("ArrowRight")
        chosen = page.run("document.activeElement.textContent")
        assert page.run("document.querySelector('[role=tab][aria-selected=true]').textContent") == chosen
        seen = reachable(page)
        assert {"BUTTON", "SELECT", "TEXTAREA", "A"} <= {tag for tag, _ in seen}
        assert [name for name in seen if not name[1]] == []


def reachable(page: Page) -> list[tuple[str, str]]:
    """Return the tag and the accessible name of each element that Tab reaches."""
    page.run("document.activeElement.blur()")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    focusable = [
        node for node in nodes
        if any(one["name"] == "focusable" and one["value"]["value"] for one in node.get("properties", ()))
        and node["role"]["value"] != "RootWebArea"
    ]  # fmt: skip
    found = []
    for node in focusable:
        tag = page.call("DOM.describeNode", backendNodeId=node["backendDOMNodeId"])["node"]["nodeName"]
        found.append((tag, node.get("name", {}).get("value", "")))
    return found


def test_narrow_window_does_not_scroll_horizontally(opened: Opened, scripted_server: ScriptedServer) -> None:
    long_lines = (
        f"```\n{'x' * 300}\n```\n\n{'y' * 300}\n\n| {' | '.join('column' * 2 for _ in range(9))} |\n{'|---' * 9}|\n"
    )
    scripted_server.says(long_lines)
    with opened(scripted_server, width=360, height=740) as page:
        send(page, "w" * 200)
        reply_ends(page)
        page.until("document.querySelectorAll('.replies tbody tr').length > 0")
        for tab in range(page.run("document.querySelectorAll('[role=tab]').length")):
            page.click(f"#tab-{tab}")
            assert page.run("document.documentElement.scrollWidth") <= 360


def test_long_list_of_long_names_fits_a_narrow_window(opened: Opened, loading_server: LoadingServer) -> None:
    names = [f"organization-with-a-long-name/repository-{number}:Q4_K_M" for number in range(9)]
    loading_server.loader.sizes |= dict.fromkeys(names, 20)
    with opened(loading_server, width=360, height=740) as page:
        page.until("document.querySelectorAll('#models li').length === 6")
        page.click("#all-models")
        page.until("document.querySelectorAll('#models li').length === 12")
        assert page.run("document.activeElement.id") == "all-models"
        assert page.run("document.documentElement.scrollWidth") <= 360
        wide = "[...document.querySelectorAll('button')].filter((one) => one.offsetHeight > 44).length"
        assert page.run(wide) == 0


def test_key_is_asked_for_and_kept_for_the_tab(
    opened: Opened, tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> None:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    policy = AccessPolicy(Authenticator([KEY]))
    with LiveServer("hash", engine, tokenizer, renderer, policy=policy) as server, opened(server) as page:
        assert page.run("document.activeElement.id") == "key-field"
        for key in ("wrong", KEY):
            page.type(key)
            page.press("Enter")
            if key == "wrong":
                page.until("document.getElementById('problem').textContent.includes('does not know this key')")
        page.until(f"{state('hash')} === '● Loaded'")
        page.open(f"{server.url}/")
        page.until(f"{state('hash')} === '● Loaded'")
        assert page.run("localStorage.length + document.cookie.length") == 0
        page.click("#tab-2")
        page.until("document.querySelector('#tab-2')?.textContent === 'curl'")
        assert KEY not in page.run("document.documentElement.outerHTML")
        assert "$INGLE_API_KEY" in page.text()
        assert all("401" in error for error in page.errors)
        page.errors.clear()


def test_missing_answers_are_reported(opened: Opened, tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer) as server, opened(server) as page:
        page.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        poll(page)
        page.until("document.getElementById('problem').textContent.includes('does not answer')")
        assert page.run("document.getElementById('status').textContent") == "No answer"
        page.call(
            "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        poll(page)
        page.until("document.getElementById('problem').hidden")
        page.errors.clear()  # the browser logs the failed requests


def test_unused_page_pauses_until_the_next_input(opened: Opened, hash_server: LiveServer) -> None:
    with opened(hash_server) as page:
        page.until("document.getElementById('status').textContent === 'Running'")
        page.run("(() => { const now = Date.now; Date.now = () => now() + 601_000; })()")
        poll(page)
        page.until("document.getElementById('status').textContent === 'Paused'")
        page.press("Tab")
        page.until("document.getElementById('status').textContent === 'Running'")


def test_snippets_name_the_server_and_that_of_curl_is_answered(opened: Opened, hash_server: LiveServer) -> None:
    with opened(hash_server) as page:
        page.until("document.querySelector('[role=tab]') !== null")
        texts = {}
        for tab in range(page.run("document.querySelectorAll('[role=tab]').length")):
            page.click(f"#tab-{tab}")
            name = page.run("document.querySelector('[role=tab][aria-selected=true]').textContent")
            texts[name] = page.run("document.querySelector('#panel code').textContent")
    commands = texts.pop("Programs").split()
    assert commands[0] == "ingle"
    assert commands[1] in COMMANDS
    assert all(hash_server.url in text and "hash" in text for text in texts.values())
    body = json.loads(texts["curl"].partition("-d '")[2].removesuffix("'"))
    answer = httpx.post(f"{hash_server.url}/v1/chat/completions", json={**body, "max_tokens": 1}, trust_env=False)
    assert answer.status_code == 200
