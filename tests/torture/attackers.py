"""Clients that attack a server, and a client that reads a stream during the attack. Each runs in a separate process.

The module imports only modules that load fast, because these processes start during a measurement.
"""

import http.client
import json
import time
from collections.abc import Mapping
from multiprocessing.queues import Queue

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MEGABYTES_10 = 10 * 10**6

Attack = tuple[str, bytes]


def _chat(**fields: object) -> bytes:
    return json.dumps({"model": "hash", "max_tokens": 1, **fields}).encode()


def _user_messages(content: str = "Hi") -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def _schema(schema: object) -> bytes:
    named = {"name": "x", "schema": schema}
    return _chat(messages=_user_messages(), response_format={"type": "json_schema", "json_schema": named})


def _padded(start: bytes, piece: bytes, end: bytes, size: int = MEGABYTES_10) -> bytes:
    return start + piece * ((size - len(start) - len(end)) // len(piece)) + end


def attacks() -> Mapping[str, Attack]:
    ids = b'{"model": "hash", "max_tokens": 1, "prompt": ['
    messages = b'{"model": "hash", "messages": ['
    properties = {f"p{number}": {"anyOf": [{"type": "string"}, {"type": "integer"}]} for number in range(2000)}
    nested: object = {"type": "string"}
    for _ in range(60):
        nested = {"type": "array", "items": nested, "minItems": 1, "maxItems": 3}
    return {
        "one message of 10 MB": (CHAT, _chat(messages=_user_messages("word " * (MEGABYTES_10 // 5 - 100)))),
        "one prompt of 3 MB": (COMPLETION, json.dumps({"model": "hash", "prompt": "x1 " * 10**6}).encode()),
        "10 MB of messages": (CHAT, _padded(messages, b'{"role":"user","content":""},', b'{"role":"user"}]}')),
        "10 MB of token ids": (COMPLETION, _padded(ids, b"1,", b"1]}")),
        "10 MB of lists": (COMPLETION, _padded(ids, b"[1],", b"[1]]}")),
        "10 MB of stops": (COMPLETION, _padded(b'{"model": "hash", "prompt": "a", "stop": [', b'"a",', b'"b"]}')),
        "10 MB of unknown fields": (CHAT, _padded(b'{"x": [', b"{},", b"{}]}")),
        "10 MB of a schema": (CHAT, _padded(b'{"model":"hash","messages":[],"guided_json":{"enum":[', b"1,", b"1]}}")),
        "10 MB of biases": (CHAT, _chat(messages=_user_messages(), logit_bias={str(key): 1 for key in range(700_000)})),
        "10 MB that is no JSON": (CHAT, _padded(b'{"model": "', b"\\u0061", b"")),
        "10 MB of brackets": (CHAT, b"[" * MEGABYTES_10),
        "a schema of 2,000 unions": (CHAT, _schema({"type": "object", "properties": properties})),
        "a schema of 60 levels": (CHAT, _schema(nested)),
        "a schema of 4,000 texts": (CHAT, _schema({"enum": [f"{number:0100}" for number in range(4000)]})),
        "a pattern": (CHAT, _schema({"type": "string", "pattern": "^(a?){500}(b|c|[^d]){500}$"})),
        "a bad field": (CHAT, _chat(messages=_user_messages(), temperature="hot")),
        "no JSON": (CHAT, b"{"),
        "another model": (CHAT, _chat(messages=_user_messages()).replace(b"hash", b"none")),
    }


def attack(port: int, names: list[str], statuses: "Queue[tuple[str, int]]") -> None:
    """Send the named attacks repeatedly, in this order, until the process is killed."""
    bodies = attacks()
    while True:
        for name in names:
            path, body = bodies[name]
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            statuses.put((name, connection.getresponse().status))
            connection.close()


def read_stream(port: int, seconds: float, gaps: "Queue[list[float]]") -> None:
    """Read streamed replies for `seconds`, then put the seconds between their tokens into `gaps`."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        body = {"model": "hash", "prompt": "Hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", COMPLETION, json.dumps(body), {"Content-Type": "application/json"})
        last, response = 0.0, connection.getresponse()
        while (line := response.readline()) and time.perf_counter() < end:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                found += [now - last] if last else []
                last = now
        connection.close()
    gaps.put(found)
