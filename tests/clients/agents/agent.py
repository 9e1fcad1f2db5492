"""Agents: the five cases for command lines, which are run once for each, with the scripted model.

A driver says how its agent is started and calls `main`. Each run has a HOME and a project folder of its own; the
project has a file whose text the model cannot know unless the agent's tool has read it.
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
from tests.clients.cases import QUESTION, WRONG_MODEL, Wrong
from tests.clients.scripted_model import ANSWER, CALL_A_TOOL, NOTE_TEXT, TOOL_FAILED, TOOL_RAN

NOTE = "note.txt"
TOOL_PROMPT = f"{CALL_A_TOOL}: Read {NOTE} and say what it says."
LONG_PROMPT = "a " * 60_000  # tokens; as bytes, less than one argument of a command line may have
AGENT_CONTEXT = 40_960  # tokens of the server's context; the largest first prompt seen has 14,336
LARGE = 200_000  # context in tokens that the agent believes in, so that it leaves the refusal to the server
TOO_LONG = r"context|too long"
REFUSED = r"not ?found|does not exist|may not exist|\b404\b"  # of a model
RUN_SECONDS = 120  # a hang guard
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Asked:
    """What an agent is started for."""

    url: str  # of the server, without a path
    model: str
    prompt: str
    dialect: str
    context: int  # tokens, as the agent is told
    shows_pieces: bool = False  # its output shows the pieces of a stream


@dataclass(frozen=True)
class Start:
    """How it is started."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # path below HOME -> text


@dataclass(frozen=True)
class Agent:
    """What a driver says of its agent."""

    start: Callable[[Asked], Start]
    pieces: Callable[[str], Sequence[str]] | None = None  # of its output; None: it prints whole replies
    too_long: str = TOO_LONG  # regular expression of what it says then


def main(agent: Agent) -> None:
    """Run cases in the current folder, which is emptied: `driver.py URL MODEL DIALECT CASE...`."""
    url, model, dialect, *cases = sys.argv[1:]
    asked = Asked(url, model, QUESTION, dialect, AGENT_CONTEXT)
    for case in cases:
        try:
            outcome = {"ok": True, "saw": _RUNS[case](agent, asked)}
        except Wrong as problem:
            outcome = {"ok": False, "saw": str(problem)}
        print(json.dumps({"case": case, **outcome}), flush=True)


def _turn(agent: Agent, asked: Asked) -> str:
    return _shown(_output(agent, asked), ANSWER)


def _stream(agent: Agent, asked: Asked) -> str:
    """Where the output shows no pieces, the connection has to."""
    if agent.pieces is None:
        with Tap(asked.url) as tap:
            said = _shown(_output(agent, replace(asked, url=tap.url)), ANSWER)
        count = tap.most_pieces
    else:
        pieces = agent.pieces(_output(agent, replace(asked, shows_pieces=True)))
        said, count = _shown("".join(pieces), ANSWER), len(pieces)
    if count < 2:
        raise Wrong(f"the stream has {count} pieces")
    return said


def _tool(agent: Agent, asked: Asked) -> str:
    output = _output(agent, replace(asked, prompt=TOOL_PROMPT))
    if TOOL_FAILED in output:
        raise Wrong(f"the tool did not read the note: {output}")
    return _shown(output, TOOL_RAN)


def _wrong_model(agent: Agent, asked: Asked) -> str:
    output = _unwrapped(_output(agent, replace(asked, model=WRONG_MODEL)))
    if ANSWER in output:
        raise Wrong("no error; another model has answered")
    if not re.search(REFUSED, output, re.IGNORECASE):
        raise Wrong(f"does not say that there is no such model: {output[-1000:]}")
    return _shown(output, WRONG_MODEL)


def _too_long(agent: Agent, asked: Asked) -> str:
    output = _unwrapped(_output(agent, replace(asked, prompt=LONG_PROMPT, context=LARGE)))
    output = output.replace(LONG_PROMPT.strip(), "")
    if ANSWER in output:
        raise Wrong("no error; the prompt was not sent as it was")
    if found := re.search(agent.too_long, output, re.IGNORECASE):
        return output[max(0, found.start() - 100) : found.end() + 100]
    raise Wrong(f"does not say that the prompt is too long: {output[-1000:]}")


_RUNS: Mapping[str, Callable[[Agent, Asked], str]] = {
    "turn": _turn,
    "stream": _stream,
    "tool": _tool,
    "wrong model": _wrong_model,
    "too long": _too_long,
}


def _shown(output: str, expected: str) -> str:
    if expected not in _unwrapped(output):
        raise Wrong(f"{expected!r} is not in its output: {output[-1000:]}")
    return expected


def _unwrapped(output: str) -> str:
    """`output` with single blanks: some agents wrap lines."""
    return " ".join(output.split())


def _output(agent: Agent, asked: Asked) -> str:
    """Standard output and standard error of one run, without colors. Raises Wrong if the agent does not end."""
    _make_project()
    start = agent.start(asked)
    with tempfile.TemporaryDirectory(prefix="ingle-agent-") as home:
        for name, text in start.files.items():
            path = Path(home, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        environment = {**os.environ, "HOME": home, **start.environment}
        environment.pop("PYTHONPATH", None)
        process = subprocess.Popen(
            start.command,
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
            output = _killed(process)
            raise Wrong(f"no end within {RUN_SECONDS} s; it said: {ESCAPES.sub('', output)[-1000:]}") from None
        finally:
            _killed(process)
    return ESCAPES.sub("", output)


def _killed(process: "subprocess.Popen[str]") -> str:
    """End an agent with all that it has started."""
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
    """The JSON objects among the lines of an output."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
