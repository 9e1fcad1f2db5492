"""Checks of clients that cannot be run without their window, by the requests that their documentation describes.

`MODEL` and `PROMPT` in a path or a body are replaced by the name of the model and the prompt of the check.
"""

import functools
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from app.client.own_server import Client as ServerClient
from app.connect.connection import Client, Connection
from app.connect.probe import (
    MOST_QUOTED,
    OK,
    RUN_SECONDS,
    Finding,
    model_of,
    new_nonce,
    short_replies,
    template_finding,
)
from app.process.instance import Instance
from app.text.terminal_text import sanitize

MODEL, PROMPT = "{model}", "{prompt}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request. The server must answer it with status 200."""

    method: Literal["GET", "POST"]
    path: str
    body: Mapping[str, Any] | None = None


_TOOL = {
    "type": "function",
    "function": {
        "name": "list_files",
        "description": "List the files in a folder.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
_MESSAGES = [{"role": "system", "content": "You are a coding assistant."}, {"role": "user", "content": PROMPT}]
_STREAM: Mapping[str, Any] = {
    "model": MODEL,
    "messages": _MESSAGES,
    "stream": True,
    "stream_options": {"include_usage": True},
}
_CHAT = Exchange("POST", "/v1/chat/completions", _STREAM)
_AGENT = Exchange("POST", "/v1/chat/completions", {**_STREAM, "tools": [_TOOL], "tool_choice": "auto"})
_LIST = Exchange("GET", "/v1/models")

EXCHANGES: Mapping[str, tuple[Exchange, ...]] = {
    "vscode": (
        Exchange("GET", "/api/version"),
        Exchange("GET", "/api/tags"),
        Exchange("POST", "/api/show", {"model": MODEL}),
        _AGENT,
    ),
    "zed": (Exchange("GET", "/models"), Exchange("GET", f"/props?model={MODEL}&autoload=false"), _AGENT),
    "jetbrains": (_LIST, Exchange("GET", "/api/v0/models"), _CHAT),
    "cursor": (_LIST, _AGENT),
    "xcode": (_LIST, _CHAT),
    "open-webui": (_LIST, _CHAT),
    "droid": (_AGENT,),
}


async def check_requests(
    client: Client, connection: Connection, instance: Instance, key: str | None
) -> AsyncIterator[Finding]:
    """Send the requests that a client is known to send, and yield what was found. The client itself is not run.

    `key` is the key of the server's owner.
    """
    nonce, name = new_nonce(), "requests"
    headers = {} if connection.key is None else {"authorization": f"Bearer {connection.key}"}
    texts = {MODEL: connection.model, PROMPT: f"Say hello. {nonce}"}
    async with (
        ServerClient(instance, key) as server,
        httpx.AsyncClient(base_url=connection.base_url, headers=headers, timeout=RUN_SECONDS, trust_env=False) as http,
        short_replies(server, nonce),
    ):
        model = await model_of(server, connection.model)
        for exchange in EXCHANGES[client.name]:
            path, body = _filled(exchange.path, texts), _filled(exchange.body, texts)
            try:
                answer = await http.request(exchange.method, path, json=body)
            except httpx.HTTPError as problem:
                yield Finding(name, "fail", f"{connection.base_url} does not answer: {problem}")
                return
            if answer.status_code != OK:
                found = f"{exchange.method} {path} returned {answer.status_code}: {sanitize(answer.text)[:MOST_QUOTED]}"
                yield Finding(name, "fail", found)
                return
        seen = await server.seen(nonce)
        if not any(one.status == OK and one.ended for one in seen):
            yield Finding(name, "fail", f"another server answered at {connection.base_url}")
            return
        yield Finding(name, "ok", f"the {len(EXCHANGES[client.name])} requests that {client.title} sends were answered")
        yield template_finding(client, model)
    yield Finding("client", "skip", f"{client.title} was not run, because it has a window")


def _filled(part: Any, texts: Mapping[str, str]) -> Any:
    """Return a part of a request with the names replaced by their texts."""
    if isinstance(part, str):
        return functools.reduce(lambda text, name: text.replace(name, texts[name]), texts, part)
    if isinstance(part, Mapping):
        return {key: _filled(value, texts) for key, value in part.items()}
    return [_filled(one, texts) for one in part] if isinstance(part, list) else part
