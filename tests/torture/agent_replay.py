"""Replay an agent's conversation of 20 turns over HTTP. During the replay, the server is killed once and stopped once.

    python -m tests.torture.agent_replay MODEL [--llama-server PATH] [--context TOKENS] [--tools NUMBER] [--agents 2]

The conversation has a long system prompt with tool definitions, tool results, and questions. Its template imitates one
that drops the reasoning of earlier replies: it removes the first twelve words of each. For each turn, the report has
the number of new tokens (in neither the last prompt nor its reply), the number of computed tokens, and the time to the
first token: for Inglenook with and without blocks on disk, and for llama-server. Several agents, each with its own
conversation, take turns; the report is about the first. Finally, the program compares the second turn of a chat of
2,000 tokens with a prompt of token ids that has the same number of new tokens.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import httpx

from app.generation.conversation import Message
from app.generation.template import ChatTemplateRenderer
from app.process.instance import running_instances
from app.settings.settings import child_environment, load_settings
from app.text import gguf_tokenizer
from app.text.tokenizer import Tokenizer
from quant.gguf import GGUFFile
from tests.support.local_servers import answers, free_port

TURNS, KILLED_AFTER, STOPPED_AFTER = 20, 8, 14
REPLY_TOKENS = 60
# tokens that a turn may compute in addition to the new ones: those of a partial block, and those of a full one, because
# no state is kept for two adjacent blocks
EXTRA_TOKENS = 32

LETTERS = "root ::= [a-z] [a-z ]*"  # grammar of all replies: a model with random weights would write invalid UTF-8
RESULT = "<tool_response>"  # start of a tool result, which is a message of the user, but no question
TEMPLATE = (
    "{%- set last = namespace(question=0) -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' and not message.content.startswith('RESULT') -%}"
    "{%- set last.question = loop.index0 -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- for message in messages -%}"
    "{%- set words = message.content.split(' ') -%}"
    "{%- set thought = message.role == 'assistant' and loop.index0 < last.question -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{{- words[12:] | join(' ') if thought else message.content -}}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}"
).replace("RESULT", RESULT)


@dataclass(frozen=True)
class Turn:
    """Measurements of one turn."""

    prompt: int  # number of tokens of the prompt
    new: int  # number of tokens after the prefix that the prompt shares with the last prompt and its reply
    computed: int
    seconds: float  # time to the first token
    reply: str


class Server(Protocol):
    """A server that can be restarted."""

    name: str

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def stop(self) -> None: ...

    def post(self) -> str: ...

    def body(self) -> Mapping[str, Any]: ...

    def computed(self, usage: Mapping[str, Any], timings: Mapping[str, Any]) -> int: ...


@dataclass
class Ingle:
    """`ingle serve` with a separate folder for its state and its blocks."""

    name: str
    model: Path
    folder: Path
    disk_gb: str
    threads: int
    context: int
    process: "subprocess.Popen[bytes] | None" = None
    url: str = ""
    served: str = ""

    def start(self) -> None:
        environment = child_environment(
            INGLE_STATE_DIR=str(self.folder / "state"),
            INGLE_KV_DISK_DIR=str(self.folder / "kv"),
            INGLE_KV_DISK_GB=self.disk_gb,
        )
        command = [sys.executable, "-m", "app", "serve", "--quiet", "--port", "0", "--model", str(self.model)]
        command += ["--threads", str(self.threads), "--context", str(self.context)]
        self.process = subprocess.Popen(command, env=environment)
        settings = replace(load_settings(), state_dir=self.folder / "state")
        while True:
            found = [it for it in running_instances(settings) if it.pid == self.process.pid]
            if found and answers(found[0].url):
                break
            if self.process.poll() is not None:
                raise SystemExit("ingle serve exited before it was ready")
            time.sleep(0.05)
        self.url, self.served = found[0].url, found[0].model

    def kill(self) -> None:
        _end(self.process, signal.SIGKILL)

    def stop(self) -> None:
        _end(self.process, signal.SIGTERM)

    def post(self) -> str:
        return f"{self.url}/v1/chat/completions"

    def body(self) -> Mapping[str, Any]:
        return {"model": self.served}

    def computed(self, usage: Mapping[str, Any], timings: Mapping[str, Any]) -> int:
        return int(usage["prompt_tokens"]) - int(usage["prompt_tokens_details"]["cached_tokens"])


@dataclass
class LlamaServer:
    """llama-server with its default settings, which turn its prompt cache on."""

    name: str
    program: Path
    model: Path
    threads: int
    context: int
    agents: int
    process: "subprocess.Popen[bytes] | None" = None
    port: int = 0

    def start(self) -> None:
        self.port = free_port()
        command = [
            str(self.program),
            "-m",
            str(self.model),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "-np",
            str(self.agents),
        ]
        command += ["-t", str(self.threads), "-tb", str(self.threads), "-c", str(self.context), "--jinja"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not answers(f"http://127.0.0.1:{self.port}"):
            if self.process.poll() is not None:
                raise SystemExit("llama-server exited before it was ready")
            time.sleep(0.05)

    def kill(self) -> None:
        _end(self.process, signal.SIGKILL)

    def stop(self) -> None:
        _end(self.process, signal.SIGTERM)

    def post(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/chat/completions"

    def body(self) -> Mapping[str, Any]:
        return {"model": "any"}

    def computed(self, usage: Mapping[str, Any], timings: Mapping[str, Any]) -> int:
        return int(timings["prompt_n"])


def _end(process: "subprocess.Popen[bytes] | None", number: int) -> None:
    if process is not None and process.poll() is None:
        os.kill(process.pid, number)
        process.wait()


@dataclass
class Conversation:
    """The agent's side of the conversation. Only the replies differ between servers."""

    tokenizer: Tokenizer
    renderer: ChatTemplateRenderer
    messages: list[Message] = field(default_factory=list)
    previous: str = ""  # rendered text of the last prompt and its reply

    def rendered(self) -> str:
        protected = [message.with_texts(self.tokenizer.protect) for message in map(_as_shown, self.messages)]
        variables: dict[str, Any] = dict(self.tokenizer.special_tokens)
        return self.renderer.render(TEMPLATE, protected, variables=variables)

    def new(self, rendered: str) -> int:
        pairs = enumerate(zip(self.previous, rendered, strict=False))
        common = next((index for index, (was, now) in pairs if was != now), min(len(self.previous), len(rendered)))
        return len(self.tokenizer.encode_rendered(rendered[common:]))

    def turn(self, server: Server, message: Message) -> Turn:
        self.messages.append(message)
        rendered = self.rendered()
        new = self.new(rendered)
        reply, usage, timings, seconds = ask(server, self.messages, REPLY_TOKENS)
        self.messages.append(Message("assistant", reply))
        self.previous = rendered + self.tokenizer.protect(reply)
        return Turn(int(usage["prompt_tokens"]), new, server.computed(usage, timings), seconds, reply)


def ask(
    server: Server, messages: Sequence[Message], tokens: int
) -> tuple[str, Mapping[str, Any], Mapping[str, Any], float]:
    """Return the reply, its usage, its timings, and the seconds to its first token."""
    body = {
        **server.body(),
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "grammar": LETTERS,
    }
    texts: list[str] = []
    usage: Mapping[str, Any] = {}
    timings: Mapping[str, Any] = {}
    first = 0.0
    began = time.perf_counter()
    with httpx.stream("POST", server.post(), json=body, timeout=3600, trust_env=False) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise SystemExit(chunk["error"])
            usage, timings = chunk.get("usage") or usage, chunk.get("timings") or timings
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    first = first or time.perf_counter() - began
                    texts.append(text)
    return "".join(texts), usage, timings, first or time.perf_counter() - began


WORDS = (
    "file",
    "line",
    "test",
    "build",
    "error",
    "value",
    "table",
    "index",
    "cache",
    "block",
    "token",
    "model",
    "reply",
)


def some_words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(count))


def system_prompt(chance: random.Random, count: int) -> str:
    tools = [
        {
            "name": f"tool_{number}",
            "description": some_words(chance, 30),
            "parameters": {name: {"type": "string", "description": some_words(chance, 8)} for name in "abc"},
        }
        for number in range(count)
    ]
    return f"You are an agent that uses tools.\n{some_words(chance, 200)}\n{json.dumps(tools, indent=1)}"


def next_message(chance: random.Random, turn: int) -> Message:
    """Return a question at the start and after every three tool results, otherwise a tool result."""
    if turn % 4 == 0:
        return Message("user", f"Question {turn}: {some_words(chance, 25)}?")
    result = json.dumps({"result": some_words(chance, chance.choice((20, 60, 120)))})
    return Message("tool", result)


def _as_shown(message: Message) -> Message:
    """Return a message as the server shows it to a template without tools."""
    if message.role == "tool":
        return Message("user", f"{RESULT}\n{message.content}\n</tool_response>")
    return message


def replay(server: Server, conversations: Sequence[Conversation], turns: int, tools: int) -> list[Turn]:
    """Return the turns of the first conversation."""
    chances = [random.Random(seed) for seed, _ in enumerate(conversations, 1)]
    for chance, conversation in zip(chances, conversations, strict=True):
        conversation.messages.append(Message("system", system_prompt(chance, tools)))
    results = []
    server.start()
    try:
        for turn in range(turns):
            pairs = zip(chances, conversations, strict=True)
            first, *_ = [it.turn(server, next_message(chance, turn)) for chance, it in pairs]
            results.append(first)
            print(f"{server.name}, turn {turn + 1}: {first.prompt} tokens, {first.computed} computed", file=sys.stderr)
            if turn + 1 == KILLED_AFTER:
                time.sleep(2)
                server.kill()
                server.start()
            if turn + 1 == STOPPED_AFTER:
                server.stop()
                server.start()
    finally:
        server.kill()
    return results


def measure_second_turns(server: Ingle, rounds: int) -> list[tuple[float, float]]:
    """Return (chat, ids) pairs of the time to the first token in seconds, one per round.

    The first time is that of the second turn of a chat of 2,000 tokens. The second is that of a prompt of token ids,
    which has the same number of cached tokens and 31 more new ones, and needs neither a template nor tokenization.
    """
    chance = random.Random(2)
    results = []
    server.start()
    try:
        for _ in range(rounds):
            messages = [Message("user", some_words(chance, 1950))]
            reply, first_usage, _, _ = ask(server, messages, 16)
            messages += [Message("assistant", reply), Message("user", some_words(chance, 30))]
            _, usage, _, seconds = ask(server, messages, 1)
            known = int(first_usage["total_tokens"])
            ids = [chance.randrange(100, 40_000) for _ in range(int(usage["prompt_tokens"]) + 31)]
            time_to_first_token(server, ids[:known])
            results.append((seconds, time_to_first_token(server, ids)))
    finally:
        server.kill()
    return results


def time_to_first_token(server: Ingle, ids: Sequence[int]) -> float:
    """Return the seconds until the first token of the reply."""
    body = {**server.body(), "prompt": ids, "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=600, trust_env=False).raise_for_status()
    return time.perf_counter() - began


@contextmanager
def with_template(model: Path) -> Iterator[Path]:
    """Write a copy of a model file with the chat template of this module."""
    with tempfile.TemporaryDirectory(prefix="agent-replay-") as folder:
        path = Path(folder, model.name)
        command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force", "--chat-template", TEMPLATE]
        subprocess.run([*command, str(model), str(path)], check=True, capture_output=True)
        yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of the second-turn measurement (default: 5)")
    parser.add_argument("--context", type=int, default=8192, help="tokens, also those of the whole KV cache")
    parser.add_argument("--tools", type=int, default=12, help="number of tools in the system prompt (default: 12)")
    parser.add_argument("--skip-no-disk", action="store_true", help="do not measure Inglenook without blocks on disk")
    parser.add_argument("--agents", type=int, default=1, help="number of agents that take turns (default: 1)")
    arguments = parser.parse_args()
    threads, context = arguments.threads, arguments.context
    with ExitStack() as resources:
        model = resources.enter_context(with_template(arguments.model))
        scratch = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="agent-replay-")))
        renderer = resources.enter_context(ChatTemplateRenderer())
        with GGUFFile(model) as file:
            tokenizer = gguf_tokenizer.from_gguf(file.metadata)
        ingle = Ingle("ingle", model, scratch / "on", "10", threads, context)
        servers: list[Server] = [ingle]
        if not arguments.skip_no_disk:
            servers.append(Ingle("ingle, no disk", model, scratch / "off", "0", threads, context))
        if program := arguments.llama_server:
            servers.append(LlamaServer("llama-server", program, model, threads, context, arguments.agents))
        results = {}
        for server in servers:
            conversations = [Conversation(tokenizer, renderer) for _ in range(arguments.agents)]
            results[server.name] = replay(server, conversations, arguments.turns, arguments.tools)
        report(results, arguments.turns)
        rounds = measure_second_turns(ingle, arguments.rounds) if arguments.rounds else []
        if not rounds:
            return
        print("second turn of 2,000 tokens, and its new tokens + 31 as ids: ", end="")
        print(", ".join(f"{1e3 * second:.0f} and {1e3 * ids:.0f} ms" for second, ids in rounds))
        print(f"median of the differences: {1e3 * statistics.median(second - ids for second, ids in rounds):.1f} ms")


def report(results: Mapping[str, Sequence[Turn]], turns: int) -> None:
    print("turn  prompt     new" + "".join(f"  {name:>24}" for name in results))
    for turn in range(turns):
        row = [of_server[turn] for of_server in results.values()]
        figures = "".join(f"  {it.computed:>12} {1e3 * it.seconds:>8.0f} ms" for it in row)
        after = {KILLED_AFTER: "  kill -9", STOPPED_AFTER: "  stopped"}.get(turn, "")
        print(f"{turn + 1:>4}  {row[0].prompt:>6}  {row[0].new:>6}{figures}{after}")
    first = next(iter(results.values()))
    exceeding = [number + 1 for number, turn in enumerate(first) if number and turn.computed > turn.new + EXTRA_TOKENS]
    later = first[1:]
    cached = 1 - sum(turn.computed for turn in later) / sum(turn.prompt for turn in later)
    print(f"cached tokens of the prompts of turns 2 to {turns}: {cached:.1%}")
    print(f"turns that computed more than their new tokens + {EXTRA_TOKENS}: {exceeding or 'none'}")
    if "ingle, no disk" in results:
        same = [it.reply for it in first] == [it.reply for it in results["ingle, no disk"]]
        print(f"replies with and without blocks on disk are {'the same' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
