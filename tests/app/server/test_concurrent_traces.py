"""Timed traces of many clients with little KV memory: bursts, cancels, retries, and prompts that cannot fit.

Each whole reply must have the text that the request gets alone. The full run is
`pytest tests/app/server/test_concurrent_traces.py --cases 10000`.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from app.generation.conversation import Message
from app.generation.template import ChatTemplateRenderer
from app.text.detokenizer import IncrementalDetokenizer
from app.text.tokenizer import Tokenizer
from engine.core import Engine
from tests.app.server.live_server import ControlledRunner, LiveServer, controlled_engine
from tests.app.server.test_disconnects import hang_up, message, read_all, send
from tests.support.hash_model import HashTicket, expected_output
from tests.support.processes import until

CONTEXT = 512  # tokens
CLIENTS = 24
WORDS = ["why", "how", "when", "does", "a", "model", "of", "the", "sea", "answer", "nothing", "at", "all"]


@pytest.fixture
def controlled(tokenizer: Tokenizer) -> tuple[Engine[HashTicket], ControlledRunner]:
    """An engine whose KV memory is that of one context, so that running requests are preempted."""
    return controlled_engine(tokenizer.vocab_size, context=CONTEXT, running=8, budget=64, contexts=1)


@pytest.fixture
def server(
    controlled: tuple[Engine[HashTicket], ControlledRunner], tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> Iterator[LiveServer]:
    engine, _ = controlled
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        yield server
        until(lambda: not engine.has_work)
    engine.assert_empty()


def expected(server: LiveServer, question: str, count: int) -> str:
    """Return the text of `count` tokens, without a character that the last of them leaves incomplete."""
    prompt = server.call(server.service.encode([Message("user", question)]))
    detokenizer = IncrementalDetokenizer(server.service.tokenizer)
    text = "".join(map(detokenizer.push, expected_output(prompt, count)))
    return text + detokenizer.finish(is_interrupted=True)


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


def text_of(reply: bytes, *, stream: bool) -> str:
    """Return the text of a whole or a streamed reply, without its chunk lengths."""
    body = reply.partition(b"\r\n\r\n")[2]
    if not stream:
        content: str = json.loads(body)["choices"][0]["message"]["content"]
        return content
    assert b"data: [DONE]" in body
    lines = [line for line in body.splitlines() if line.startswith(b"data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line[6:])["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@dataclass
class Trace:
    """Random requests of several clients, some of which share long prefixes."""

    server: LiveServer
    rng: random.Random
    questions: list[str] = field(default_factory=lambda: ["Hi"])
    replies: list[tuple[str, int, str]] = field(default_factory=list)  # question, number of tokens, and text
    counts: Counter[str] = field(default_factory=Counter)

    def question(self) -> str:
        """Return an old question, or the start of one with more words."""
        old = self.rng.choice(self.questions[-40:])
        if self.rng.random() < 0.3:
            return old
        words = old.split()[: self.rng.randrange(1, 120)]
        words += self.rng.choices(WORDS, k=self.rng.choice([1, 5, 20, 60]))
        self.questions.append(" ".join(words[:180]))
        return self.questions[-1]

    async def client(self, requests: Iterator[int]) -> None:
        """Send requests, in bursts without a pause between them."""
        for _ in requests:
            if self.rng.random() < 0.1:
                await asyncio.sleep(self.rng.random() / 5)
            question, count, stream = self.question(), self.rng.randrange(1, 60), self.rng.random() < 0.5
            sent = message(question, max_tokens=count, stream=stream)
            while self.rng.random() < 0.2:
                await self._cancel(sent)
            reply = await read_all(self.server, sent)
            assert status_of(reply) == 200, reply
            self.replies.append((question, count, text_of(reply, stream=stream)))

    async def _cancel(self, sent: bytes) -> None:
        """Send a request and disconnect soon, at a random point."""
        _, writer = await send(self.server, sent)
        await asyncio.sleep(self.rng.choice([0, 0.01, 0.1, 0.5]) * self.rng.random())
        await hang_up(writer, reset=self.rng.random() < 0.5)
        self.counts["cancelled"] += 1


def test_replies_under_random_traces_equal_single_replies(server: LiveServer, cases: int, seed: int) -> None:
    trace = Trace(server, random.Random(seed))

    async def run() -> None:
        requests = iter(range(cases))
        await asyncio.gather(*(trace.client(requests) for _ in range(CLIENTS)))

    began = time.monotonic()
    asyncio.run(run())
    counters = server.engine.state().counters
    preemptions = counters.swapped_out + counters.recomputed
    print(
        f"{cases} replies, {trace.counts['cancelled']} cancelled requests, {preemptions} preemptions,"
        f" {time.monotonic() - began:.0f} s"
    )
    assert len(trace.replies) == cases
    assert preemptions > 0
    for question, count, text in trace.replies:
        assert text == expected(server, question, count), (question, count)


def test_prompt_that_cannot_fit_is_refused_beside_50_others(
    server: LiveServer, controlled: tuple[Engine[HashTicket], ControlledRunner]
) -> None:
    """The pool holds one context. The refusal names the limit, and the other replies are those of single requests."""
    rng = random.Random(0)
    questions = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 60))) for _ in range(50)]
    long = message("sea " * (CONTEXT + 1), max_tokens=4)

    async def refused() -> tuple[bytes, float]:
        began = time.monotonic()
        return await read_all(server, long), time.monotonic() - began

    async def run() -> tuple[list[bytes], tuple[bytes, float]]:
        with controlled[1].held():
            others = [asyncio.create_task(read_all(server, message(text, max_tokens=30))) for text in questions]
            while len(server.streams._live) < len(others):
                await asyncio.sleep(0.01)
            answer = await refused()
            assert not any(task.done() for task in others)
        return await asyncio.gather(*others), answer

    replies, (refusal, seconds) = asyncio.run(run())
    error = json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]
    print(f"refused in {1000 * seconds:.0f} ms: {error['message']}")
    assert status_of(refusal) == 400
    assert error["code"] == "context_length_exceeded"
    assert f"{CONTEXT}" in error["message"]
    for question, reply in zip(questions, replies, strict=True):
        assert text_of(reply, stream=False) == expected(server, question, 30)
