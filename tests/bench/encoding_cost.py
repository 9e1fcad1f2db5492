"""Measure the time to encode a long conversation in each turn: `python -m tests.bench.encoding_cost MODEL.gguf`.

The messages contain source code. Half of them are replies whose token ids differ from those that a tokenizer would
produce for their text. Each turn adds a different last message to messages that were encoded before. Prints the median
and the maximum over the turns in milliseconds, for each stage, for all stages without the template's process, and for
that process alone.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from app.generation.conversation import Message
from app.generation.prompt_encoder import PromptEncoder
from app.generation.remembered_replies import GeneratedReply
from app.generation.reply_token_cache import ReplyTokenCache
from app.generation.template import ChatTemplateRenderer
from app.text.gguf_tokenizer import from_gguf
from app.text.tokenizer import Tokenizer
from quant.gguf import GGUFFile

TURNS = 50


class TimedRenderer(ChatTemplateRenderer):
    """A renderer that stores the text of the last render and the seconds that it took."""

    seconds = 0.0
    rendered = ""

    def render(self, template: str, messages: Sequence[Message], **options: Any) -> str:
        start = time.perf_counter()
        self.rendered = super().render(template, messages, **options)
        self.seconds = time.perf_counter() - start
        return self.rendered


def source_code() -> str:
    folder = Path(__file__).parents[2]
    files = sorted(path for part in ("app", "engine", "quant") for path in (folder / part).rglob("*.py"))
    return "".join(path.read_text(encoding="utf-8") for path in files)


def conversation(encoder: PromptEncoder, tokenizer: Tokenizer, tokens: int, characters: int) -> list[Message]:
    """Return messages of `characters` characters each and at least `tokens` tokens, with remembered replies."""
    source, messages, total = source_code(), [Message("system", "Be brief.")], 0
    while total < tokens:
        question, source = source[:characters], source[characters:]
        reply, source = source[:characters].strip(), source[characters:]
        messages.append(Message("user", question))
        prompt_ids = encoder.encode(messages)
        # Pieces of 7 characters give token ids that no tokenizer would produce for the whole text.
        pieces = [reply[n : n + 7] for n in range(0, len(reply), 7)]
        ids = [token_id for piece in pieces for token_id in tokenizer.encode_continuation(piece) or ()]
        encoder.remember(GeneratedReply(prompt_ids, ids, reply, continues_text=False, stored=True))
        messages.append(Message("assistant", reply))
        total = len(prompt_ids) + len(ids)
    return messages


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def format_row(name: str, seconds: Sequence[float]) -> str:
    return f"{name:28} {1e3 * statistics.median(seconds):7.2f} {1e3 * max(seconds):7.2f}"


def measure(tokenizer: Tokenizer, tokens: int, characters: int, folder: Path) -> None:
    with TimedRenderer() as renderer:
        reply_tokens = ReplyTokenCache(folder)
        encoder = PromptEncoder(tokenizer, renderer, reply_tokens)
        messages, numbers = conversation(encoder, tokenizer, tokens, characters), count()
        reply_tokens.flush()

        def turn() -> list[Message]:
            return [*messages, Message("user", f"Question {next(numbers)}")]

        parts: dict[str, Callable[[], object]] = {
            "protect": lambda: [message.with_texts(tokenizer.protect) for message in turn()],
            "split": lambda: [*tokenizer.split(renderer.rendered, rendered=True)],
            "encode, without the reply token cache": lambda: tokenizer.encode_rendered(renderer.rendered),
        }
        encoding, rendering = [], []
        for _ in range(TURNS):
            encoding.append(timed(lambda: encoder.encode(turn())) - renderer.seconds)
            rendering.append(renderer.seconds)
        prompt = encoder.encode(turn())
        print(f"{len(messages)} messages, {len(renderer.rendered):,} characters, {len(prompt):,} tokens")
        print(f"{'':28} {'median':>7} {'worst':>7}  ms")
        for name, part in parts.items():
            part()
            print(format_row(name, [timed(part) for _ in range(TURNS)]))
        print(format_row("total without the template", encoding))
        print(format_row("the template's process", rendering))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=38_000)
    parser.add_argument("--characters", type=int, default=6000, help="characters per message (default: 6000)")
    arguments = parser.parse_args()
    with GGUFFile(arguments.model) as file, tempfile.TemporaryDirectory() as folder:
        measure(from_gguf(file.metadata), arguments.tokens, arguments.characters, Path(folder))


if __name__ == "__main__":
    main()
