"""Checks a client from end to end: it is run with a nonce in its prompt, and the server tells which request had it.

The checks hold for any model, since they read no text of a reply. Replies are stopped after a number of tokens.
"""

import asyncio
import os
import re
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO, Literal, TypeAlias

from app.client.own_server import Client as ServerClient
from app.client.own_server import SeenRequest, ServerModel
from app.connect.connection import Client, Connection
from app.connect.model_choice import NATIVE
from app.errors import AppError
from app.process.instance import Instance
from app.text.terminal_text import sanitize

RUN_SECONDS = 300.0  # limit of one run of a client
REPLY_TOKENS = 64  # tokens of a reply after which it is stopped
TOOL_REQUEST = "Use a tool to list the files in this folder"

_POLL_SECONDS = 0.2
_CACHED_SHARE = 0.9  # of the prompt of a second run
_UNCACHED_TOKENS = 48  # that are computed in any case: the last block, and the end of the prompt
_MOST_OUTPUT = 1 << 20  # bytes of a client's output that are read
MOST_QUOTED = 200  # characters of a client's output in a report
_USE_TOOLS = "Use a model that has them: ingle ls."
OK, _NOT_FOUND = 200, 404
_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_OF_KEYS = re.compile(r"\b401\b|unauthori[sz]ed|api.?key", re.IGNORECASE)
_OF_CONTEXT = re.compile(r"context|too long|maximum", re.IGNORECASE)

Status: TypeAlias = Literal["ok", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Probed:
    """A client to check, set up for a server."""

    client: Client
    connection: Connection
    command: Sequence[str]  # the prompt is added at its end
    environment: Mapping[str, str]
    believed_context: int | None = None  # context length in the settings of the client; None: unknown


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a client."""

    status: int | None  # exit status; None: it did not end in time
    output: str
    errors: str
    seen: Sequence[SeenRequest]  # its requests, as the server saw them

    @property
    def last_line(self) -> str:
        """The last line of its errors, or else of its output."""
        lines = [line.strip() for text in (self.output, self.errors) for line in text.splitlines() if line.strip()]
        return sanitize(lines[-1])[:MOST_QUOTED] if lines else ""


async def check_client(probed: Probed, instance: Instance, key: str | None) -> AsyncIterator[Finding]:
    """Run a client several times in an empty folder, and yield what was found.

    `key` is the key of the server's owner. Raises ServerUnreachable or ServerError.
    """
    nonce = new_nonce()
    with tempfile.TemporaryDirectory(prefix="ingle-probe-") as folder:
        async with ServerClient(instance, key) as server:
            model = await model_of(server, probed.connection.model)
            first = await _run(probed, f"Say hello. {nonce}", nonce, folder, server)
            yield _output(first)
            yield (reached := _requests(probed, first))
            yield _context(probed, model, first)
            if reached.status == "fail":
                return
            second = await _run(probed, f"Say hello. {nonce}", nonce, folder, server, known=len(first.seen))
            yield _cache(second)
            yield await _tools(probed, model, first, folder, server)


def template_finding(client: Client, model: ServerModel) -> Finding:
    """Check that the chat template of the model has the tools that a client needs."""
    if client.needs_tools and model.tools != NATIVE:
        return Finding("tools", "fail", f"the chat template of {model.name} has no tools", _USE_TOOLS)
    return Finding("tools", "ok", f"the chat template of {model.name} suits {client.title}")


def new_nonce() -> str:
    return f"ingle-probe-{secrets.token_hex(16)}"


async def model_of(server: ServerClient, name: str) -> ServerModel:
    return next(one for one in await server.models() if name in one.names)


async def _run(probed: Probed, prompt: str, nonce: str, folder: str, server: ServerClient, *, known: int = 0) -> Run:
    """Run the client with a prompt. `known`: number of requests with the nonce from earlier runs."""
    # files instead of pipes, which a process that the client leaves running would keep open
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        async with short_replies(server, nonce):
            status = await _exit_status(probed, prompt, folder, output, errors)
        seen = (await server.seen(nonce))[known:]
        return Run(status, _plain(_content(output)), _plain(_content(errors)), seen)


async def _exit_status(probed: Probed, prompt: str, folder: str, output: IO[bytes], errors: IO[bytes]) -> int | None:
    """Run the client, and return its exit status; None: it did not end in time."""
    process = await asyncio.create_subprocess_exec(
        *probed.command,
        prompt,
        cwd=folder,
        env=probed.environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(RUN_SECONDS):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        _kill(process)


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(_MOST_OUTPUT)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a client and the processes that it started."""
    with suppress(ProcessLookupError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)


@asynccontextmanager
async def short_replies(server: ServerClient, nonce: str) -> AsyncIterator[None]:
    """Stop each long reply to the nonce while the body runs."""

    async def stop_long_replies() -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            with suppress(AppError):
                if any(one.reply == nonce and one.reply_tokens >= REPLY_TOKENS for one in await server.requests()):
                    await server.stop(nonce)

    stopping = asyncio.create_task(stop_long_replies())
    try:
        yield
    finally:
        stopping.cancel()


def _plain(output: bytes) -> str:
    return _ESCAPES.sub("", output.decode(errors="replace"))


def _output(run: Run) -> Finding:
    """Check the exit status and that the client printed something."""
    if run.status is None:
        return Finding("reply", "fail", f"it did not end within {RUN_SECONDS:.0f} s", "See its log.")
    if run.status != 0:
        return Finding("reply", "fail", f"it ended with status {run.status}: {run.last_line}", "See the next lines.")
    if not run.output.strip():
        return Finding("reply", "fail", f"it printed no reply: {run.last_line}", "See the next lines.")
    return Finding("reply", "ok", "it printed a reply, and ended with status 0")


def _requests(probed: Probed, run: Run) -> Finding:
    """Check that the server answered a request of the run to its end, on the path that the client is known to use."""
    name, client = "server", probed.client
    if not run.seen:
        return Finding(name, "fail", *_why_unseen(probed, run))
    answered = [one for one in run.seen if one.status == OK and one.ended and one.path == client.request_path]
    if answered:
        largest = max(answered, key=lambda one: one.prompt_tokens)
        return Finding(name, "ok", f"it answered {largest.path} with a prompt of {largest.prompt_tokens:,} tokens")
    return Finding(name, "fail", *_why_refused(probed, run))


def _why_unseen(probed: Probed, run: Run) -> tuple[str, str]:
    """Return why no request reached the server, and what to do."""
    found, url = "it saw no request of the client", probed.connection.base_url
    if proxy := proxy_in_the_way(probed.environment):
        return f"{found}; {proxy} is set, which sends requests to a proxy", "Add 127.0.0.1 to NO_PROXY."
    if _OF_KEYS.search(run.errors + run.output):
        return f"{found} with a valid key: {run.last_line}", f"Set the API key of {probed.client.title}."
    if run.status == 0:
        found += ", so another server answered it"
    return found, f"Set the address in the settings of {probed.client.title} to {url}."


def _why_refused(probed: Probed, run: Run) -> tuple[str, str]:
    last, model = run.seen[-1], probed.connection.model
    if last.status == _NOT_FOUND and last.model != model:
        return f"it has no model {last.model!r}, which the client asked for", f"Set its model to {model}."
    if last.status == OK and last.ended:
        return f"the client used {last.path} instead of {probed.client.request_path}", "Set the kind of its provider."
    if last.status == OK:
        return f"the reply of {last.path} did not end", "See the log of the server."
    if _OF_CONTEXT.search(run.errors + run.output):
        return f"the prompt does not fit the context: {run.last_line}", "Raise it: ingle serve --context N."
    return f"it answered {last.path} with status {last.status}: {run.last_line}", "See the log of the server."


def _context(probed: Probed, model: ServerModel, run: Run) -> Finding:
    """Check that the client does not expect a longer context than the server has, and that its prompts fit."""
    served = model.context_length or 0
    believed = probed.believed_context or probed.connection.context_length
    remedy = f"Set it to {served}, or raise that of the server: ingle serve --context {believed}."
    if believed > served:
        return Finding("context", "fail", f"the client expects {believed:,} tokens, and it has {served:,}", remedy)
    largest = max((one.max_tokens or 0 for one in run.seen), default=0)
    if largest > served:
        return Finding("context", "fail", f"the client asks for {largest:,} tokens of {served:,}", remedy)
    return Finding("context", "ok", f"{served:,} tokens, of which the client expects {believed:,}")


def _cache(run: Run) -> Finding:
    """Check that the prompt of a second run was cached."""
    request = max(run.seen, key=lambda one: one.prompt_tokens, default=None)
    if request is None:
        return Finding("cache", "fail", f"the second run sent no request: {run.last_line}")
    missing = request.prompt_tokens - request.cached_tokens
    found = f"{request.cached_tokens:,} of {request.prompt_tokens:,} tokens of the second run were cached"
    if missing <= max(_UNCACHED_TOKENS, (1 - _CACHED_SHARE) * request.prompt_tokens):
        return Finding("cache", "ok", found)
    return Finding("cache", "fail", found, "A part of its prompt changes with each run. ingle serve logs its position.")


async def _tools(probed: Probed, model: ServerModel, first: Run, folder: str, server: ServerClient) -> Finding:
    """Check that the client sends tools, and that the result of a call arrives."""
    name = "tools"
    if not probed.client.needs_tools:
        return Finding(name, "skip", f"{probed.client.title} needs none")
    if not any(one.tools for one in first.seen):
        return Finding(name, "fail", "the client sends no tools", "Turn tools on in its settings of the model.")
    if (template := template_finding(probed.client, model)).status == "fail":
        return template
    nonce = new_nonce()
    run = await _run(probed, f"{TOOL_REQUEST}. {nonce}", nonce, folder, server)
    if any(one.tool_results and one.status == OK and one.ended for one in run.seen):
        return Finding(name, "ok", "a tool was called, and its result arrived")
    if any(one.tool_results for one in run.seen):
        return Finding(name, "fail", f"the request with the result failed: {run.last_line}", "See the server's log.")
    return Finding(name, "skip", f"{model.name} called no tool")


def proxy_in_the_way(environment: Mapping[str, str]) -> str:
    """Return the variable that names a proxy for requests to this machine; empty if there is none."""
    exempt = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").replace(" ", "").split(",")
    if "*" in exempt or "127.0.0.1" in exempt:
        return ""
    return next((name for name in _PROXIES if environment.get(name)), "")
