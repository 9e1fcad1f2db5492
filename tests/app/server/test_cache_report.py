"""Cache reports of requests: the number of tokens from each cache tier, and the reason for a miss.

Reports appear in `usage`, in Inglenook's client, in a log line per request, and in /metrics. The tests use the hash
model, whose output is predictable.
"""

import asyncio
import functools
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, closing, contextmanager
from typing import Any

import httpx
import openai
import pytest

from app.client.own_server import Client
from app.generation import request_log
from app.generation.cache_report import CacheReport, Miss, MissReason
from app.generation.conversation import Message
from app.generation.events import ChatEvent, PromptProgress, ReplyEnd, TextDelta
from app.generation.options import GenerationOptions
from app.generation.request_log import PrefillLog
from app.generation.service import ChatService
from app.generation.template import ChatTemplateRenderer
from app.process.instance import Instance
from app.server.dialects.llama_cpp import endpoints as llama_endpoints
from app.server.dialects.openai import endpoints as openai_endpoints
from app.server.dialects.responses import endpoints as response_endpoints
from app.server.http.reply import StreamedReply
from app.text.tokenizer import Tokenizer
from engine.request import Request, TokenSources
from engine.sampling_params import BeamParams, SamplingParams
from tests.app.generation.reply_events import reply_events
from tests.app.server.live_server import ControlledRunner, LiveServer, controlled_engine
from tests.app.server.test_bad_requests import CHAT, COMPLETION
from tests.app.server.test_metrics import figure, scraped
from tests.support.hash_model import expected_output
from tests.support.processes import until

# Ids that are text tokens, not control tokens, in every vocabulary.
PROMPT = tuple(range(1000, 1100))
REPLY = expected_output(PROMPT, 40)

Serve = Callable[..., AbstractContextManager[LiveServer]]


@pytest.fixture
def serve(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Serve:
    @contextmanager
    def served(**engine: Any) -> Iterator[LiveServer]:
        built, _ = controlled_engine(tokenizer.vocab_size, **engine)
        with LiveServer("hash", built, tokenizer, renderer) as server:
            yield server
        built.assert_empty()

    return served


@pytest.fixture
def server(serve: Serve) -> Iterator[LiveServer]:
    with serve() as server:
        yield server


def post(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "hash", "max_tokens": 40, "ignore_eos": True, **fields}
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def complete(server: LiveServer, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Complete a prompt and return the reported `prompt_tokens_details`."""
    details: dict[str, Any] = post(server, COMPLETION, prompt=list(prompt), **fields)["usage"]["prompt_tokens_details"]
    return details


def chat(server: LiveServer, *contents: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content} for content in contents]
    details: dict[str, Any] = post(server, CHAT, messages=messages, **fields)["usage"]["prompt_tokens_details"]
    return details


def details(device: int, computed: int, miss: dict[str, Any] | None = None) -> dict[str, Any]:
    reported = {
        "cached_tokens": device,
        "device_tokens": device,
        "host_tokens": 0,
        "disk_tokens": 0,
        "computed_tokens": computed,
        "restore_ms": 0.0,
    }
    return reported if miss is None else reported | {"miss": miss}


def text(server: LiveServer, ids: Sequence[int]) -> str:
    return server.service.tokenizer.decode(ids, continues_text=True).strip("\ufffd")


def test_repeated_prompt_is_cached_except_for_its_new_end(server: LiveServer) -> None:
    assert complete(server, PROMPT) == details(0, 100, {"reason": "first_time", "position": 0})
    assert complete(server, PROMPT) == details(96, 4)
    assert complete(server, (*PROMPT, *REPLY, 7, 8, 9)) == details(128, 15)


def test_changed_prompt_reports_the_text_on_both_sides(server: LiveServer) -> None:
    complete(server, PROMPT)
    other = (*PROMPT, *REPLY[:5], *range(2000, 2040))
    miss = {
        "reason": "diverged",
        "position": 105,
        "before": text(server, other[97:105]),
        "was": text(server, REPLY[5:13]),
        "is": text(server, other[105:113]),
    }
    assert complete(server, other) == details(96, 49, miss)


def test_removed_part_of_a_prompt_is_reported(server: LiveServer) -> None:
    complete(server, PROMPT)
    reported = complete(server, (*PROMPT, *REPLY[10:], 7, 8, 9))
    assert (reported["cached_tokens"], reported["computed_tokens"]) == (96, 37)
    assert (reported["miss"]["reason"], reported["miss"]["position"]) == ("removed", 100)
    assert reported["miss"]["removed"] == text(server, REPLY[:10])


def test_blocks_replaced_by_others_are_reported_as_evicted(serve: Serve) -> None:
    with serve(context=256, contexts=1) as server:
        complete(server, PROMPT)
        for first in (2000, 3000):
            complete(server, range(first, first + 200))
        assert complete(server, PROMPT) == details(0, 100, {"reason": "evicted", "position": 0})


def test_prompt_with_logprobs_is_prefilled_completely(server: LiveServer) -> None:
    complete(server, PROMPT)
    reported = complete(server, PROMPT, echo=True, logprobs=1)
    assert reported == details(0, 100, {"reason": "prompt_logprobs", "position": 0})


def test_prompts_with_another_salt_do_not_count_as_earlier(server: LiveServer) -> None:
    complete(server, PROMPT, cache_salt="a")
    assert complete(server, PROMPT, cache_salt="b") == details(0, 100, {"reason": "first_time", "position": 0})
    assert complete(server, PROMPT, cache_salt="a") == details(96, 4)


@pytest.mark.parametrize(("steps", "wanted"), [(3, PromptProgress), (6, TextDelta)])
def test_prompt_of_a_disconnected_client_counts_as_earlier(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer, steps: int, wanted: type[ChatEvent]
) -> None:
    """The client disconnects during prefill in one case, and during decode in the other."""
    engine, runner = controlled_engine(tokenizer.vocab_size, context=256, contexts=1, budget=32)

    async def leave_after(steps: int, service: ChatService) -> None:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        with runner.held() as allowed:
            allowed.release(steps)
            async with aclosing(reply_events(service, PROMPT, params)) as events:
                async for event in events:
                    if isinstance(event, wanted) and getattr(event, "done", 96) == 96:
                        return

    with LiveServer("hash", engine, tokenizer, renderer) as server:
        server.call(leave_after(steps, server.service))
        until(lambda: not engine.has_work)
        for first in (2000, 3000):
            complete(server, range(first, first + 200))
        assert complete(server, PROMPT) == details(0, 100, {"reason": "evicted", "position": 0})


def test_reply_before_a_stop_string_is_cached_for_the_next_prompt(server: LiveServer) -> None:
    """The cached reply ends before the tokens of the stop string."""
    tokenizer = server.service.tokenizer
    length = next(at for at in range(20, 40) if text(server, REPLY[at : at + 2]).isascii())
    stop = text(server, REPLY[length : length + 2])
    complete(server, PROMPT, stop=stop)
    assert tokenizer.decode(REPLY[:length], continues_text=True).find(stop) < 0
    assert "miss" not in complete(server, (*PROMPT, *REPLY[:length], *range(2000, 2010)))


def test_several_choices_report_their_prompt_once(server: LiveServer) -> None:
    reported = complete(server, PROMPT, n=3)
    assert reported == details(0, 100, {"reason": "first_time", "position": 0})
    assert complete(server, PROMPT, n=3) == details(96, 4)
    samples = scraped(server)
    assert figure(samples, "cache_misses_total", reason="first_time") == 1


def test_beam_search_reports_its_prompt_once(server: LiveServer) -> None:
    fields: dict[str, Any] = {"n": 2, "best_of": 4, "use_beam_search": True, "max_tokens": 5, "ignore_eos": False}
    assert complete(server, PROMPT, **fields) == details(0, 100, {"reason": "first_time", "position": 0})
    assert complete(server, PROMPT, **fields) == details(96, 4)


@pytest.mark.parametrize("length", range(30, 36))
def test_result_of_a_beam_search_is_cached_for_the_next_prompt(server: LiveServer, length: int) -> None:
    async def searched(service: ChatService) -> list[Sequence[int]]:
        params = SamplingParams(max_tokens=length, ignore_eos=True, beams=BeamParams(4, results=3), logprobs=0)
        replies: list[list[int]] = [[] for _ in range(3)]
        async with aclosing(service.reply([PROMPT], GenerationOptions([params], 3))) as batches:
            async for batch in batches:
                for number, event in batch:
                    if isinstance(event, TextDelta):
                        replies[number] += [token.token_id for token in event.logprobs]
        return [*replies]

    for reply in server.call(searched(server.service)):
        assert len(reply) == length
        reported = complete(server, (*PROMPT, *reply, 7, 8, 9), max_tokens=1)
        assert (reported["cached_tokens"], "miss" in reported) == ((99 + length) // 16 * 16, False)


def test_counts_of_several_prompts_are_added(server: LiveServer) -> None:
    complete(server, PROMPT)
    body: Any = [list(PROMPT), list(range(2000, 2050))]
    reported = post(server, COMPLETION, prompt=body)["usage"]["prompt_tokens_details"]
    assert reported == details(96, 54, {"reason": "first_time", "position": 0})


def test_changed_start_of_a_conversation_is_reported(server: LiveServer) -> None:
    question = "What should be worn today, if it rains as it did all week?"
    reported = [
        chat(server, f"It is {hour} o'clock on a Monday in the middle of a long winter. {question}")
        for hour in ("nine", "ten")
    ]
    assert reported[0]["miss"]["reason"] == "first_time"
    miss = reported[1]["miss"]
    assert (miss["reason"], miss["before"][-5:]) == ("diverged", "It is")
    assert miss["was"].startswith(" nine o'clock")
    assert miss["is"].startswith(" ten o'clock")


def test_openai_client_accepts_the_report(server: LiveServer) -> None:
    """The client validates every field and keeps unknown ones."""
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True) as api:
        reply = api.completions.create(model="hash", prompt=list(PROMPT), max_tokens=3)
        question: Any = [{"role": "user", "content": "What is the capital of France?"}]
        stream = api.chat.completions.create(
            model="hash", messages=question, max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
        usages = [reply.usage, list(stream)[-1].usage]
    for usage in usages:
        assert usage is not None
        reported = usage.prompt_tokens_details
        assert reported is not None
        assert reported.cached_tokens == 0
        assert reported.model_extra is not None
        assert reported.model_extra["computed_tokens"] == usage.prompt_tokens
        assert reported.model_extra["miss"] == {"reason": "first_time", "position": 0}


def test_own_client_reads_the_report_of_the_service(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    miss = Miss(MissReason.REMOVED, 40, "before", "was", "is", "removed")
    report = CacheReport(TokenSources(16, 32, 48, 7, 0.0125), miss)
    monkeypatch.setattr(server.service.cache, "report", lambda *_, **__: report)
    assert asked_by_client(server, "Hello").cache == report


def test_cache_report_of_the_client_equals_that_of_the_engine(server: LiveServer, serve: Serve) -> None:
    async def directly(service: ChatService, question: str) -> CacheReport:
        ids = await service.encode([Message("user", question)])
        async with aclosing(reply_events(service, ids, SamplingParams(max_tokens=20))) as events:
            *_, end = [event async for event in events]
            assert isinstance(end, ReplyEnd)
            return end.cache

    questions = ["Which is the longest river of all that flow to the north?"] * 2 + ["Which is the longest street?"]
    with serve() as own:
        expected = [own.call(directly(own.service, question)) for question in questions]
    assert [asked_by_client(server, question).cache for question in questions] == expected
    assert expected[0].miss is not None
    assert expected[1].miss is None


def asked_by_client(server: LiveServer, question: str) -> ReplyEnd:
    async def ask() -> ReplyEnd:
        address = Instance(1, server.port, server.url, "hash", "/m.gguf", "2026-01-01T00:00:00+00:00")
        async with Client(address) as client:
            replies = client.stream_chat("hash", [Message("user", question)], SamplingParams(max_tokens=20))
            *_, end = [event async for event in replies]
            assert isinstance(end, ReplyEnd)
            return end

    return asyncio.run(ask())


# -- /metrics


def test_metrics_count_misses_by_reason_and_restores(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(server, PROMPT)
    complete(server, PROMPT)
    complete(server, (*PROMPT, *REPLY[:5], *range(2000, 2040)))
    samples = scraped(server)
    counts = {reason.value: figure(samples, "cache_misses_total", reason=reason.value) for reason in MissReason}
    assert counts == dict.fromkeys(counts, 0) | {"first_time": 1, "diverged": 1}
    assert figure(samples, "cache_restore_seconds_count", service_class="normal") == 0

    report = server.service.cache.report

    def restored(request: Request, miss: Miss | None, read: int, *, counts: bool) -> CacheReport:
        request.cache = TokenSources(device=16, host=32, restore_seconds=0.03)
        return report(request, miss, read, counts=counts)

    monkeypatch.setattr(server.service.cache, "report", restored)
    reported = complete(server, PROMPT, service_class="background", n=2)
    assert (reported["host_tokens"], reported["restore_ms"]) == (32, 30.0)
    samples = scraped(server)
    assert figure(samples, "cache_restore_seconds_count", service_class="background") == 1
    assert figure(samples, "cache_restore_seconds_sum", service_class="background") == pytest.approx(0.03)


def test_request_that_never_ran_has_no_miss(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    engine, runner = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        runner.failures = 1
        body = {"model": "hash", "prompt": list(PROMPT)}
        assert httpx.post(server.url + COMPLETION, json=body, timeout=60).status_code == 500
        samples = scraped(server)
        assert not any(figure(samples, "cache_misses_total", reason=reason.value) for reason in MissReason)
        assert complete(server, PROMPT) == details(0, 100, {"reason": "first_time", "position": 0})


# -- log


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == request_log.log.name]


def test_each_request_logs_one_line_without_its_text(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, request_log.log.name)
    complete(server, PROMPT, n=2)
    complete(server, (*PROMPT, *REPLY[:5], *range(2000, 2040)), service_class="background")
    chat(server, "A secret that no log may hold. " * 10, max_tokens=1)
    first, second, third = lines(caplog)
    assert first.startswith(
        "hash normal; prompt 100: 0 device, 0 RAM, 0 disk, 100 computed; no similar prompt before; first token after "
    )
    assert " ms; 80 tokens at " in first
    assert "hash background; prompt 145: 96 device, 0 RAM, 0 disk, 49 computed; diverged at token 105; " in second
    assert "; 1 tokens" in third
    assert not any(word in line for line in (first, second, third) for word in ("secret", text(server, REPLY[5:13])))


def test_failed_and_aborted_requests_are_logged(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, request_log.log.name)
    body = {"model": "hash", "prompt": list(PROMPT), "max_tokens": 1500, "ignore_eos": True, "stream": True}
    runner = server.engine._runner
    assert isinstance(runner, ControlledRunner)
    with runner.held() as steps:  # hold the steps, so that the request cannot end before the client disconnects
        steps.release(5)
        with httpx.stream("POST", server.url + COMPLETION, json=body, timeout=60) as response:
            next(response.iter_lines())
        until(lambda: len(lines(caplog)) == 1)
    body |= {"prompt": [1000] * 5000}
    assert httpx.post(server.url + COMPLETION, json=body, timeout=60).status_code == 400
    assert lines(caplog) == ["hash normal; prompt 100; ended by the client", "hash normal; prompt 5000; PromptTooLong"]


def reading_lines(caplog: pytest.LogCaptureFixture, *events: PromptProgress) -> list[str]:
    """Return the log lines for prefill events."""
    caplog.set_level(logging.INFO, request_log.log.name)
    caplog.clear()
    log = PrefillLog("hash normal")
    for event in events:
        log.log_progress(0, event)
    return [line.removeprefix("hash normal; prefill: ") for line in lines(caplog)]


def test_long_prompt_is_logged_at_the_start_and_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    events = [PromptProgress(256 * step, 21_979, 0, seconds=float(2 * step)) for step in range(1, 14)]
    assert reading_lines(caplog, *events) == [
        "256 of 21,979 tokens (1 %), about 3 min left",
        "1,536 of 21,979 tokens (7 %), about 3 min left",
        "2,816 of 21,979 tokens (13 %), about 2 min left",
    ]


def test_short_prompt_is_logged_only_if_it_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    events = [PromptProgress(100 * step, 1000, 0, seconds=float(2 * step)) for step in range(1, 11)]
    assert reading_lines(caplog, *events) == ["500 of 1,000 tokens (50 %), about 10 s left"]
    cached = PromptProgress(9000, 9100, 8900, seconds=0.5)
    assert reading_lines(caplog, cached) == []


def holds_or_step(steps: threading.Semaphore, condition: Callable[[], bool]) -> bool:
    """Release one step, and return whether the condition holds. If it does, take back all unused releases."""
    steps.release()
    holds = condition()
    while holds and steps.acquire(blocking=False):
        pass
    return holds


def test_prefill_is_logged_and_sent_to_a_waiting_client(
    tokenizer: Tokenizer,
    renderer: ChatTemplateRenderer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_log, "LONG_PROMPT", 400)
    caplog.set_level(logging.INFO, request_log.log.name)
    hurried = functools.partial(StreamedReply, ping_seconds=0.001)
    for module in (openai_endpoints, llama_endpoints, response_endpoints):
        monkeypatch.setattr(module, "StreamedReply", hurried)
    engine, runner = controlled_engine(tokenizer.vocab_size, budget=64)
    with LiveServer("hash", engine, tokenizer, renderer) as server, runner.held() as steps:
        for number, (path, field) in enumerate(
            [(COMPLETION, "prompt"), (CHAT, "messages"), ("/completion", "prompt"), ("/v1/responses", "input")]
        ):
            text = f"{number} is the number. " + "word " * 500
            asked = [{"role": "user", "content": text}] if field == "messages" else text
            body = {"model": "hash", field: asked, "stream": True, "max_tokens": 1, "store": False}
            steps.release(2)
            with httpx.stream("POST", server.url + path, json=body, timeout=60) as response:
                comments = (line for line in response.iter_lines() if line.startswith(": prefill"))
                assert re.fullmatch(r": prefill \d+ of 5\d\d", next(comments))
            # the line of a request that has ended must not be read as a line of the next one
            until(functools.partial(holds_or_step, steps, lambda: any("; prompt " in it for it in lines(caplog))))
            until(functools.partial(holds_or_step, steps, lambda: not engine.has_requests))
            assert re.fullmatch(r"hash normal; prefill: \d+ of 5\d\d tokens \(\d\d %\), .*", lines(caplog)[0])
            caplog.clear()


def test_newlines_in_a_client_name_do_not_split_the_log_line(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, request_log.log.name)
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("a\nb\x1b[2J", engine, tokenizer, renderer) as server:
        post(server, COMPLETION, model="a\nb\x1b[2J", prompt="Hi")
    assert lines(caplog)[0].startswith("a b [2J normal; prompt ")


def test_log_lines_are_printed_without_blocking_the_server(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    with request_log.write_request_log(said.append):
        complete(server, PROMPT)
        logging.getLogger("some.library").info("noise")
        until(lambda: len(said) == 1)
    complete(server, PROMPT)
    assert (len(said), request_log.log.handlers, lines(caplog)) == (1, [], [])
    time_of_day, line = said[0].split(" ", 1)
    assert len(time_of_day.split(":")) == 3
    assert line.startswith("hash normal; prompt 100: ")
    with closing(Stuck()) as stuck, request_log.write_request_log(stuck.say):
        for _ in range(3):
            complete(server, PROMPT)
        until(lambda: stuck.is_stuck)


class Stuck:
    """A terminal whose output blocks until it is closed."""

    def __init__(self) -> None:
        self.is_stuck = False
        self._closed = threading.Event()

    def say(self, line: str) -> None:
        self.is_stuck = True
        self._closed.wait()

    def close(self) -> None:
        self._closed.set()
