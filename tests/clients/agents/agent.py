"""Run the five cases with the command line of an agent and the scripted model, one process per case.

An agent's driver defines its command and settings, and calls `main`. Each run has a temporary HOME and an empty project
folder with one file. The model cannot know the text of this file unless the agent's tool reads it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.clients.agents.tap import Tap
from tests.clients.cases import QUESTION, WRONG_MODEL, CaseFailed
from tests.clients.scripted_model import ANSWER, CALL_A_TOOL, NOTE_TEXT, TOOL_FAILED, TOOL_RAN

NOTE = "note.txt"
TOOL_PROMPT = f"{CALL_A_TOOL}: Read {NOTE} and say what it says."
LONG_PROMPT = "a " * 60_000  # 60,000 tokens, and short enough for one command-line argument
AGENT_CONTEXT = 40_960  # context length of the server in tokens; the longest first prompt of an agent has 14,336
# context length in tokens that the agent assumes, so that the server refuses the long prompt and not the agent
LARGE_CONTEXT = 200_000
TOO_LONG = r"context|too long"
MODEL_NOT_FOUND = r"not ?found|does not exist|may not exist|\b404\b"  # pattern of error messages about a missing model
RUN_SECONDS = 120  # time limit of a run, in case the agent hangs
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Request:
    """The parameters of one run of an agent."""

    url: str  # URL of the server, without a path
    model: str
    prompt: str
    dialect: str
    context: int  # context length in tokens for the agent's settings
    shows_pieces: bool = False  # whether the output must show the pieces of a stream separately


@dataclass(frozen=True)
class Invocation:
    """The command, environment variables, and files of one run."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # text of each file, by path below HOME


@dataclass(frozen=True)
class Agent:
    """An agent: how to run it, and how to read its output."""

    invocation: Callable[[Request], Invocation]
    # returns the streamed pieces in an output; None: the agent prints only complete replies
    pieces: Callable[[str], Sequence[str]] | None = None
    too_long: str = TOO_LONG  # pattern of the agent's error message for a prompt that is too long


def main(agent: Agent) -> None:
    """Run cases in the current folder, and empty it before each of them: `driver.py URL MODEL DIALECT CASE...`."""
    url, model, dialect, *cases = sys.argv[1:]
    request = Request(url, model, QUESTION, dialect, AGENT_CONTEXT)
    for case in cases:
        try:
            outcome = {"ok": True, "detail": _RUNS[case](agent, request)}
        except CaseFailed as problem:
            outcome = {"ok": False, "detail": str(problem)}
        print(json.dumps({"case": case, **outcome}), flush=True)


def _turn(agent: Agent, request: Request) -> str:
    return _checked(_output(agent, request), ANSWER)


def _stream(agent: Agent, request: Request) -> str:
    """Check that the reply is streamed, and return its text.

    The pieces are counted on the connection if the agent's output does not show them.
    """
    if agent.pieces is None:
        with Tap(request.url) as tap:
            text = _checked(_output(agent, replace(request, url=tap.url)), ANSWER)
        count = tap.max_pieces
    else:
        pieces = agent.pieces(_output(agent, replace(request, shows_pieces=True)))
        text, count = _checked("".join(pieces), ANSWER), len(pieces)
    if count < 2:
        raise CaseFailed(f"the stream has {count} pieces")
    return text


def _tool(agent: Agent, request: Request) -> str:
    output = _output(agent, replace(request, prompt=TOOL_PROMPT))
    if TOOL_FAILED in output:
        raise CaseFailed(f"the tool did not read the note: {output}")
    return _checked(output, TOOL_RAN)


def _wrong_model(agent: Agent, request: Request) -> str:
    output = _unwrapped(_output(agent, replace(request, model=WRONG_MODEL)))
    if ANSWER in output:
        raise CaseFailed("no error; another model answered")
    if not re.search(MODEL_NOT_FOUND, output, re.IGNORECASE):
        raise CaseFailed(f"the output does not say that the model does not exist: {output[-1000:]}")
    return _checked(output, WRONG_MODEL)


def _too_long(agent: Agent, request: Request) -> str:
    output = _unwrapped(_output(agent, replace(request, prompt=LONG_PROMPT, context=LARGE_CONTEXT)))
    output = output.replace(LONG_PROMPT.strip(), "")
    if ANSWER in output:
        raise CaseFailed("no error; the prompt was not sent unchanged")
    if found := re.search(agent.too_long, output, re.IGNORECASE):
        return output[max(0, found.start() - 100) : found.end() + 100]
    raise CaseFailed(f"the output does not say that the prompt is too long: {output[-1000:]}")


_RUNS: Mapping[str, Callable[[Agent, Request], str]] = {
    "turn": _turn,
    "stream": _stream,
    "tool": _tool,
    "wrong model": _wrong_model,
    "too long": _too_long,
}


def _checked(output: str, expected: str) -> str:
    if expected not in _unwrapped(output):
        raise CaseFailed(f"{expected!r} is not in the output: {output[-1000:]}")
    return expected


def _unwrapped(output: str) -> str:
    """Replace all white space by single spaces, since some agents wrap lines."""
    return " ".join(output.split())


def _output(agent: Agent, request: Request) -> str:
    """Return standard output and standard error of one run, without colors. Raises CaseFailed if the agent hangs."""
    _make_project()
    invocation = agent.invocation(request)
    with tempfile.TemporaryDirectory(prefix="ingle-agent-") as home:
        for name, text in invocation.files.items():
            path = Path(home, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        environment = {**os.environ, "HOME": home, **invocation.environment}
        environment.pop("PYTHONPATH", None)
        process = subprocess.Popen(
            invocation.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            output = _kill(process)
            raise CaseFailed(
                f"still running after {RUN_SECONDS} s; output: {ESCAPES.sub('', output)[-1000:]}"
            ) from None
        finally:
            _kill(process)
    return ESCAPES.sub("", output)


def _kill(process: "subprocess.Popen[str]") -> str:
    """Kill an agent with all processes that it started, and return the rest of its output."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return "" if process.stdout is None or process.stdout.closed else process.communicate()[0]


def _make_project() -> None:
    for path in Path.cwd().iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    Path(NOTE).write_text(f"The note says {NOTE_TEXT}.\n", encoding="utf-8")


def json_lines(output: str) -> Sequence[Mapping[str, object]]:
    """Return the JSON objects in an output that has one per line."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
