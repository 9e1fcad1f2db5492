"""The five cases: what each asks of a client and when its outcome is right. Runs in the client's own environment.

A driver offers a `Client` and calls `main`, which prints one JSON object for each case:
{"case": "turn", "ok": true, "saw": "..."}. Standard library only.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

CASES = ("turn", "stream", "tool", "wrong model", "too long")
_ASKED = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))  # cases.mjs reads it as well
QUESTION: str = _ASKED["question"]
REPLY_TOKENS: int = _ASKED["reply_tokens"]  # limit of a reply, for clients that can set one
TOOL_QUESTION: str = _ASKED["tool_question"]  # asks the scripted model for a call
TOOL_TOKENS: int = _ASKED["tool_tokens"]
TOOL_NAME: str = _ASKED["tool"]["name"]
TOOL_DESCRIPTION: str = _ASKED["tool"]["description"]
TOOL_SCHEMA: Mapping[str, Any] = _ASKED["tool"]["schema"]
WRONG_MODEL: str = _ASKED["wrong_model"]
LONG_PROMPT = "word " * _ASKED["long_prompt_words"]  # more than SmolLM2 holds


class Wrong(Exception):
    """A client's outcome is not what its user needs. The text says what it is instead."""


@dataclass(frozen=True)
class Refusal:
    """How a client reports that the server refused: by an exception of this type that has these attributes."""

    kind: type[Exception]
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Client(Protocol):
    """A client on one server. Its requests raise what the client raises."""

    wrong_model: Refusal
    too_long: Refusal

    def reply(self, model: str, prompt: str) -> str:
        """The whole reply to a user's message."""

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        """The reply piece by piece, as the client streams it."""

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        """Name and arguments of the tool that the model calls; the client forces a call if it can."""


def main(connect: Callable[[str, str], Client]) -> None:
    """Run cases: `driver.py URL MODEL DIALECT CASE...`. `connect` takes the URL and the dialect."""
    url, model, dialect, *cases = sys.argv[1:]
    client = connect(url, dialect)
    for case in cases:
        print(json.dumps({"case": case, **outcome(client, model, case)}), flush=True)


def outcome(client: Client, model: str, case: str) -> Mapping[str, Any]:
    """Whether a case is right, and the text of the reply or of the error."""
    try:
        return {"ok": True, "saw": _RUNS[case](client, model)}
    except Exception as problem:  # noqa: BLE001 (whatever a client raises is its outcome)
        name = "" if isinstance(problem, Wrong) else f"{type(problem).__name__}: "
        return {"ok": False, "saw": f"{name}{problem}"}


def _turn(client: Client, model: str) -> str:
    return _text([client.reply(model, QUESTION)])


def _stream(client: Client, model: str) -> str:
    pieces = [piece for piece in client.pieces(model, QUESTION) if piece]
    if len(pieces) < 2:
        raise Wrong(f"the stream has {len(pieces)} pieces of text")
    return _text(pieces)


def _text(pieces: Sequence[str]) -> str:
    text = "".join(pieces)
    if not text.strip():
        raise Wrong("the reply is empty")
    return text


def _tool(client: Client, model: str) -> str:
    name, arguments = client.call(model, TOOL_QUESTION)
    if name != TOOL_NAME or not isinstance(arguments.get("city"), str):
        raise Wrong(f"called {name} with {json.dumps(arguments)}")
    return f"{name}({json.dumps(arguments)})"


def _wrong_model(client: Client, _model: str) -> str:
    said = _refused(lambda: client.reply(WRONG_MODEL, QUESTION), client.wrong_model)
    if WRONG_MODEL not in said:
        raise Wrong(f"the error does not name the model: {said}")
    return said


def _too_long(client: Client, model: str) -> str:
    said = _refused(lambda: client.reply(model, LONG_PROMPT), client.too_long)
    if not re.search("context|too long", said):
        raise Wrong(f"the error does not say that the prompt is too long: {said}")
    return said


def _refused(ask: Callable[[], str], expected: Refusal) -> str:
    """The text of the error, which has to be the one that is expected."""
    try:
        reply = ask()
    except expected.kind as problem:
        for name, value in expected.attributes.items():
            if getattr(problem, name, None) != value:
                raise Wrong(f"{name} is {getattr(problem, name, None)!r}, not {value!r}: {problem}") from problem
        return f"{type(problem).__name__}: {problem}"
    except Exception as problem:
        raise Wrong(f"{type(problem).__name__}, not {expected.kind.__name__}: {problem}") from problem
    raise Wrong(f"no error; the reply is {reply!r}")


_RUNS: Mapping[str, Callable[[Client, str], str]] = dict(
    zip(CASES, (_turn, _stream, _tool, _wrong_model, _too_long), strict=True)
)


def first(items: Iterable[Any], what: str) -> Any:
    """The first item. Raises Wrong if there is none."""
    for item in items:
        return item
    raise Wrong(f"no {what}")


def texts(items: Iterable[Any], read: Callable[[Any], str | None]) -> Iterator[str]:
    """The texts of a stream's items, without those that have none."""
    for item in items:
        if text := read(item):
            yield text
