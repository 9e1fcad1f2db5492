"""A server that is killed and restarted finds its KV cache and replies on disk.

The tests use real processes and the real model.
"""

import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from tests.app.commands.test_serve import Server, environment_of, ready, serve
from tests.support.processes import HANGING_SECONDS, until

KEPT_SECONDS = 2.0  # time in which a server that stores a reply would have written it
SAVED_SECONDS = 6.0  # time after which the tokens of a running reply have been written
BLOCK_SIZE = 16
QUESTION = {"role": "user", "content": "Tell me of the sea, of its storms and of those who sail it. " * 6}
ENDLESS = {"logit_bias": {str(end_id): -100 for end_id in (0, 1, 2)}}  # forbid the tokens that would end the reply
NEXT = {"role": "user", "content": "And of the mountains?"}


class Start(Protocol):
    def __call__(self, **environment: str) -> Server: ...


@pytest.fixture
def start(smollm2: Path, cpu_kernels: Path, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts servers of one user, which share an on-disk cache."""
    with ExitStack() as stack:

        def started(**environment: str) -> Server:
            own = environment_of(smollm2, tmp_path) | {"INGLE_KV_DISK_DIR": str(tmp_path / "kv")} | environment
            process = stack.enter_context(serve(own, "--context", "4096"))
            stack.callback(process.kill)
            return ready(process, own)

        yield started


def ask(server: Server, messages: Sequence[Mapping[str, str]], **fields: object) -> Any:
    body = {"model": "smollm2:135m", "messages": messages, "temperature": 0.9, "seed": 5, "max_tokens": 32, **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    assert response.status_code == httpx.codes.OK, response.text
    return response.json()


def stream_for(server: Server, messages: Sequence[Mapping[str, str]], seconds: float, kept: float) -> tuple[str, str]:
    """Read an endless reply for some seconds.

    Return the text that had arrived `kept` seconds before the last piece, and the whole text.
    """
    body = {"model": "smollm2:135m", "messages": messages, "temperature": 0.9, "seed": 5, "stream": True}
    texts: list[tuple[float, str]] = []
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body | ENDLESS, timeout=120, trust_env=False
    ) as response:
        end = 0.0
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text = json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
                texts.append((time.monotonic(), text))
                end = end or time.monotonic() + seconds
            if end and time.monotonic() > end:
                break
    whole = "".join(text for _, text in texts)
    return "".join(text for at, text in texts if at < texts[-1][0] - kept), whole


def kill(server: Server) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(HANGING_SECONDS)


def wait_until_saved(server: Server) -> None:
    """Wait until the server has written to disk, and has written nothing more for 2 s."""
    written: list[str] = []

    def is_steady() -> bool:
        time.sleep(0.1)
        metrics = httpx.get(f"{server.url}/metrics", trust_env=False).text
        [line] = (line for line in metrics.splitlines() if line.startswith("ingle:disk_written_bytes_total"))
        written.append(line.rpartition(" ")[2])
        return float(written[-1]) > 0 and len(written) > 20 and len({*written[-20:]}) == 1

    until(is_steady)


def tokens_of(answer: Any) -> Mapping[str, Any]:
    return {**answer["usage"], **answer["usage"]["prompt_tokens_details"]}


@pytest.mark.share(1)
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_next_turn_restores_prompt_and_reply(start: Start, end: str) -> None:
    server = start()
    answer = ask(server, [QUESTION])
    reply = answer["choices"][0]["message"]
    if end == "kill":
        wait_until_saved(server)
        kill(server)
    else:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(HANGING_SECONDS) == 0
    again = tokens_of(ask(start(), [QUESTION, reply, NEXT]))
    computed = answer["usage"]["total_tokens"] - 1  # the last token is never prefilled
    assert again["disk_tokens"] == computed // BLOCK_SIZE * BLOCK_SIZE
    assert again["device_tokens"] == 0
    assert again["restore_ms"] > 0


def test_interrupted_reply_is_restored_up_to_the_saved_part(start: Start) -> None:
    server = start()
    kept, whole = stream_for(server, [QUESTION], 10.0, SAVED_SECONDS)
    kill(server)
    server = start()
    said = [{"role": "assistant", "content": text} for text in (kept, whole)]
    again = tokens_of(ask(server, [QUESTION, said[1], NEXT]))
    prompts = [[QUESTION], [QUESTION, said[0]]]
    first, second = (tokens_of(ask(server, it, store=False, max_tokens=1))["prompt_tokens"] for it in prompts)
    assert second > first
    # Encoding a truncated text again can give a few more tokens than were generated.
    assert again["disk_tokens"] > first + 0.9 * (second - first) - 2 * BLOCK_SIZE


@pytest.mark.share(1)
@pytest.mark.parametrize(("environment", "fields"), [({"INGLE_KV_DISK_GB": "0"}, {}), ({}, {"store": False})])
def test_chat_with_store_disabled_leaves_nothing_on_disk(
    start: Start, tmp_path: Path, environment: dict[str, str], fields: dict[str, object]
) -> None:
    server = start(**environment)
    reply = ask(server, [QUESTION], **fields)["choices"][0]["message"]
    if fields:  # a background request must also leave nothing, although store is true
        ask(server, [QUESTION, reply, NEXT], service_class="background")
    time.sleep(KEPT_SECONDS)
    kill(server)
    assert not [path for path in (tmp_path / "kv").rglob("*") if path.suffix in (".run", ".sqlite")]
    assert tokens_of(ask(start(**environment), [QUESTION, reply, NEXT]))["cached_tokens"] == 0
    assert (tmp_path / "kv").exists() == (not environment)
