"""Define the five cases: the request of each one, and the check of its reply. Runs in the client's environment.

A driver defines a `Client` and calls `main`, which prints one JSON object for each case: {"case": "turn", "ok": true,
"detail": "..."}. Imports only the standard library.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

CASES = ("turn", "stream", "tool", "wrong model", "too long")
_DATA = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))  # cases.mjs reads the same file
QUESTION: str = _DATA["question"]
REPLY_TOKENS: int = _DATA["reply_tokens"]  # maximum tokens of a reply, for clients that can set it
TOOL_QUESTION: str = _DATA["tool_question"]  # this prompt makes the scripted model call a tool
TOOL_TOKENS: int = _DATA["tool_tokens"]
TOOL_NAME: str = _DATA["tool"]["name"]
TOOL_DESCRIPTION: str = _DATA["tool"]["description"]
TOOL_SCHEMA: Mapping[str, Any] = _DATA["tool"]["schema"]
WRONG_MODEL: str = _DATA["wrong_model"]
LONG_PROMPT = "word " * _DATA["long_prompt_words"]  # longer than SmolLM2's context


class CaseFailed(Exception):
    """The client's reply or error is not what the case requires. The text describes the difference."""


@dataclass(frozen=True)
class ExpectedError:
    """The error that a client must raise if the server refuses a request: its type, and some of its attributes."""

    kind: type[Exception]
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Client(Protocol):
    """A client connected to one server. Its methods raise the client's own errors."""

    wrong_model: ExpectedError
    too_long: ExpectedError

    def reply(self, model: str, prompt: str) -> str:
        """Return the complete reply to a user message."""

    def pieces(self, model: str, prompt: str) -> Iterable[str]:
        """Yield the pieces of a streamed reply."""

    def call(self, model: str, prompt: str) -> tuple[str, Mapping[str, Any]]:
        """Return the name and the arguments of the tool that the model calls. The call is forced if the client supports
        it.
        """


def main(connect: Callable[[str, str], Client]) -> None:
    """Run cases: `driver.py URL MODEL DIALECT CASE...`. `connect` takes the URL and the dialect."""
    url, model, dialect, *cases = sys.argv[1:]
    client = connect(url, dialect)
    for case in cases:
        print(json.dumps({"case": case, **outcome(client, model, case)}), flush=True)


def outcome(client: Client, model: str, case: str) -> Mapping[str, Any]:
    """Return whether a case passed, and the text of the reply or of the error."""
    try:
        return {"ok": True, "detail": _RUNS[case](client, model)}
    except Exception as problem:  # noqa: BLE001 (any error of a client is its outcome)
        name = "" if isinstance(problem, CaseFailed) else f"{type(problem).__name__}: "
        return {"ok": False, "detail": f"{name}{problem}"}


def _turn(client: Client, model: str) -> str:
    return _text([client.reply(model, QUESTION)])


def _stream(client: Client, model: str) -> str:
    pieces = [piece for piece in client.pieces(model, QUESTION) if piece]
    if len(pieces) < 2:
        raise CaseFailed(f"the stream has {len(pieces)} pieces of text")
    return _text(pieces)


def _text(pieces: Sequence[str]) -> str:
    text = "".join(pieces)
    if not text.strip():
        raise CaseFailed("the reply is empty")
    return text


def _tool(client: Client, model: str) -> str:
    name, arguments = client.call(model, TOOL_QUESTION)
    if name != TOOL_NAME or not isinstance(arguments.get("city"), str):
        raise CaseFailed(f"called {name} with {json.dumps(arguments)}")
    return f"{name}({json.dumps(arguments)})"


def _wrong_model(client: Client, _model: str) -> str:
    message = _expected_error(lambda: client.reply(WRONG_MODEL, QUESTION), client.wrong_model)
    if WRONG_MODEL not in message:
        raise CaseFailed(f"the error does not name the model: {message}")
    return message


def _too_long(client: Client, model: str) -> str:
    message = _expected_error(lambda: client.reply(model, LONG_PROMPT), client.too_long)
    if not re.search("context|too long", message):
        raise CaseFailed(f"the error does not say that the prompt is too long: {message}")
    return message


def _expected_error(request: Callable[[], str], expected: ExpectedError) -> str:
    """Return the text of the error that `request` raises. Raises CaseFailed if it is not the expected error."""
    try:
        reply = request()
    except expected.kind as problem:
        for name, value in expected.attributes.items():
            if getattr(problem, name, None) != value:
                raise CaseFailed(f"{name} is {getattr(problem, name, None)!r}, not {value!r}: {problem}") from problem
        return f"{type(problem).__name__}: {problem}"
    except Exception as problem:
        raise CaseFailed(f"{type(problem).__name__}, not {expected.kind.__name__}: {problem}") from problem
    raise CaseFailed(f"no error; the reply is {reply!r}")


_RUNS: Mapping[str, Callable[[Client, str], str]] = dict(
    zip(CASES, (_turn, _stream, _tool, _wrong_model, _too_long), strict=True)
)


def first(items: Iterable[Any], what: str) -> Any:
    """Return the first item. Raises CaseFailed if there are no items."""
    for item in items:
        return item
    raise CaseFailed(f"no {what}")


def texts(items: Iterable[Any], read: Callable[[Any], str | None]) -> Iterator[str]:
    """Yield the text of each item of a stream. Empty texts are left out."""
    for item in items:
        if text := read(item):
            yield text
