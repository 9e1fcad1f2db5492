"""Images and documents in requests: words replace them in the prompt, and the reply reports their number."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import httpx
import pytest

from app.generation.conversation import Conversation
from app.generation.model_format import ChatPrompt
from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.scripted_server import ScriptedServer

Json: TypeAlias = dict[str, Any]

PICTURE = "data:image/png;base64,AAAA"
LINK = "https://example.com/a/screenshot%201.png?signature=1#top"
PDF = "data:application/pdf;base64,AAAA"
AT_LINK, PNG = "[image that this model cannot see: screenshot 1.png]", "[image that this model cannot see: image/png]"
NAMELESS = "[image that this model cannot see]"
REPORT = "[document that this model cannot read: report.pdf, application/pdf]"
SHOT = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
REPORT_BLOCK = {
    "type": "document",
    "title": "report.pdf",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
}


def anthropic(*turns: str) -> Json:
    first = {"type": "text", "text": "See"}, {"type": "image", "source": {"type": "url", "url": LINK}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [SHOT, REPORT_BLOCK]}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    messages = [
        {"role": "user", "content": [*first]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        *({"role": role, "content": turn} for role, turn in zip(("assistant", "user"), turns, strict=False)),
    ]
    return {"messages": messages, "max_tokens": 20}


def chat(*turns: str) -> Json:
    parts = {"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": LINK, "detail": "low"}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    file = {"type": "file", "file": {"filename": "report.pdf", "file_data": PDF}}
    messages = [
        {"role": "user", "content": [*parts]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "image_url", "image_url": PICTURE}, file]},
        *({"role": role, "content": turn} for role, turn in zip(("assistant", "user"), turns, strict=False)),
    ]
    return {"messages": messages, "max_tokens": 20}


def responses(*turns: str) -> Json:
    parts = {"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": LINK, "detail": "auto"}
    file = {"type": "input_file", "filename": "report.pdf", "file_data": PDF}
    output = [{"type": "input_image", "image_url": PICTURE}, file]
    items = [
        {"role": "user", "content": [*parts]},
        {"type": "function_call", "name": "look", "call_id": "1", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": output},
        *({"role": role, "content": turn} for role, turn in zip(("assistant", "user"), turns, strict=False)),
    ]
    return {"input": items, "max_output_tokens": 20}


def ollama(*turns: str) -> Json:
    call = {"function": {"name": "look", "arguments": {}}}
    messages = [
        {"role": "user", "content": "See", "images": ["AAAA"]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "", "images": ["AAAA"]},
        *({"role": role, "content": turn} for role, turn in zip(("assistant", "user"), turns, strict=False)),
    ]
    return {"messages": messages}


def ollama_prompt(*_: str) -> Json:
    return {"prompt": "See", "images": ["AAAA"]}


def lm_studio(*_: str) -> Json:
    return {"input": [{"type": "message", "content": "See"}, {"type": "image", "data_url": PICTURE}]}


BOTH = [f"See\n{AT_LINK}", f"{PNG}\n{REPORT}"]
NUMBERS = ["2 images", "1 document"]
# Path, the body, the contents of the user's and the tool's messages, the report, and the path of the first image.
DIALECTS: Mapping[str, tuple[str, Callable[..., Json], Sequence[str], Sequence[str], str]] = {
    "anthropic": ("/v1/messages", anthropic, BOTH, NUMBERS, "messages[0].content[1]"),
    "chat": ("/v1/chat/completions", chat, BOTH, NUMBERS, "messages[0].content[1]"),
    "responses": ("/v1/responses", responses, BOTH, NUMBERS, "input[0].content[1]"),
    "ollama": ("/api/chat", ollama, [f"{NAMELESS}\nSee", NAMELESS], ["2 images"], "messages[0].images[0]"),
    "generate": ("/api/generate", ollama_prompt, [f"{NAMELESS}\nSee"], ["1 image"], "images[0]"),
    "lm_studio": ("/api/v1/chat", lm_studio, [f"See\n{PNG}"], ["1 image"], "input[0].content[1]"),
}


def post(server: LiveServer, path: str, body: Json) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": server.service.name, **body}, timeout=60, trust_env=False)


def left_out(reply: object) -> list[str]:
    """Return the value of the only field `left_out` in a JSON value."""
    if isinstance(reply, list):
        return next(filter(None, map(left_out, reply)), [])
    if not isinstance(reply, dict):
        return []
    return reply["left_out"] if "left_out" in reply else left_out([*reply.values()])


def events(answer: httpx.Response) -> Iterator[Json]:
    """Yield the events of a stream, or the lines of Ollama's."""
    for line in answer.text.splitlines():
        if (text := line.removeprefix("data: ")).startswith("{"):
            yield json.loads(text)


@pytest.fixture
def prompts(scripted_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> list[Conversation]:
    """The conversations that the server encodes."""
    scripted_server.says("Done.")
    seen: list[Conversation] = []
    encode = scripted_server.service.prompt

    async def noted(conversation: Conversation) -> ChatPrompt:
        seen.append(conversation)
        return await encode(conversation)

    monkeypatch.setattr(scripted_server.service, "prompt", noted)
    return seen


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_words_replace_attachments_and_the_reply_reports_their_number(
    scripted_server: ScriptedServer, prompts: list[Conversation], dialect: str, stream: bool
) -> None:
    path, body, contents, numbers, _ = DIALECTS[dialect]
    options = {"stream_options": {"include_usage": True}} if stream and dialect == "chat" else {}
    answer = post(scripted_server, path, {**body(), "stream": stream, **options})
    assert answer.status_code == 200, answer.text
    assert [message.content for message in prompts[0].messages if message.role in ("user", "tool")] == contents
    assert left_out([*events(answer)] if stream else answer.json()) == numbers


@pytest.mark.parametrize("dialect", ["anthropic", "chat", "responses"])
def test_prompt_with_attachments_stays_cached_over_the_turns(
    scripted_server: ScriptedServer, prompts: list[Conversation], dialect: str
) -> None:
    path, body, *_ = DIALECTS[dialect]
    first = post(scripted_server, path, body()).json()["usage"]
    changed = json.loads(json.dumps(body("Done.", "Next")).replace("signature=1", "signature=2"))
    usage = post(scripted_server, path, changed).json()["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    before = first.get("prompt_tokens_details") or first["input_tokens_details"]
    assert details["cached_tokens"] >= before["cached_tokens"] + before["computed_tokens"] - 16
    assert "miss" not in details or details["miss"]["reason"] != "diverged"


def test_stored_response_keeps_the_words_instead_of_the_data(
    scripted_server: ScriptedServer, prompts: list[Conversation]
) -> None:
    stored = post(scripted_server, "/v1/responses", responses()).json()["id"]
    listed = httpx.get(f"{scripted_server.url}/v1/responses/{stored}/input_items", trust_env=False)
    assert (PNG in listed.text, "AAAA" in listed.text) == (True, False)
    later = {"input": "Next", "previous_response_id": stored}
    assert left_out(post(scripted_server, "/v1/responses", later).json()) == []
    assert [one.content for one in prompts[1].messages][:3] == [one.content for one in prompts[0].messages]


def test_compaction_reports_attachments(scripted_server: ScriptedServer, prompts: list[Conversation]) -> None:
    compacted = post(scripted_server, "/v1/responses/compact", {"input": responses()["input"]})
    assert (left_out(compacted.json()), "AAAA" in compacted.text) == (NUMBERS, False)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"messages": anthropic()["messages"]}),
        ("/v1/responses/input_tokens", {"input": responses()["input"]}),
        ("/v1/chat/completions/input_tokens", {"messages": chat()["messages"]}),
        ("/apply-template", {"messages": chat()["messages"]}),
    ],
)
def test_words_count_as_tokens_of_the_prompt(scripted_server: ScriptedServer, path: str, body: Json) -> None:
    counted = post(scripted_server, path, body)
    assert counted.status_code == 200, counted.text
    assert counted.json().get("input_tokens", 50) >= 50
    assert AT_LINK in counted.json().get("prompt", AT_LINK)


@pytest.fixture(scope="module")
def refusing_server(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[LiveServer]:
    """A server whose setting `images` is "refuse"."""
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer, refuses_attachments=True) as server:
        yield server


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_setting_refuses_attachments_with_their_path(refusing_server: LiveServer, dialect: str, stream: bool) -> None:
    path, body, _, _, at = DIALECTS[dialect]
    refused = post(refusing_server, path, {**body(), "stream": stream})
    assert refused.status_code == 400
    assert f"{at}: no model here can see this image. Send text" in refused.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "audio"}]}], "max_tokens": 1}),
        ("/api/generate", {"prompt": "a", "raw": True, "images": ["AAAA"]}),
    ],
)
def test_audio_and_images_in_raw_prompts_are_refused(scripted_server: ScriptedServer, path: str, body: Json) -> None:
    refused = post(scripted_server, path, body)
    assert (refused.status_code, "reads text only" in refused.text) == (400, True), refused.text


def test_plain_text_of_a_document_is_part_of_the_prompt(
    scripted_server: ScriptedServer, prompts: list[Conversation]
) -> None:
    block = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Hello"}}
    reply = post(scripted_server, "/v1/messages", {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1})
    assert (prompts[0].messages[0].content, left_out(reply.json())) == ("Hello", [])


def test_refusals_are_read_and_reported_as_in_the_api(
    scripted_server: ScriptedServer, prompts: list[Conversation]
) -> None:
    parts = [{"type": "refusal", "refusal": "No."}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}]
    reply = post(scripted_server, "/v1/chat/completions", {"messages": messages}).json()
    assert prompts[0].messages[1].content == "No."
    assert reply["choices"][0]["message"]["refusal"] is None
