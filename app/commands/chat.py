"""`ingle` and `ingle chat`: the chat in the terminal, by screens or by plain lines."""

import signal
import sys

import click

from app.process.signals import ending_signals
from app.settings.api_keys import chosen_keys
from app.settings.settings import is_dumb_terminal, load_settings

EXAMPLES = """\b
Examples:
  ingle
  ingle chat --model qwen3:4b
  ingle chat --plain
  ingle chat --endpoint http://gpu-box:8000/v1 --api-key-file ./key
"""


@click.command(epilog=EXAMPLES)
@click.argument("question", required=False, default="")
@click.option("-m", "--model", help="A model of the catalog or of the Hub, or the path of a GGUF file or a folder.")
@click.option(
    "--endpoint", metavar="URL", default="", help="Another server that speaks OpenAI's dialect, with its /v1."
)
@click.option("--api-key-file", metavar="FILE", help="The key that the other server wants, in a file.")
@click.option("--plain", is_flag=True, help="Lines instead of screens: for voices, dumb terminals and pipes.")
@click.option("--stay", is_flag=True, help="Leave the engine running when the last chat has ended.")
@click.option("--context", type=int, help="Longest prompt and answer together, in tokens.")
@click.option("--threads", type=int, help="Threads of the CPU engine.")
def chat(
    question: str,
    model: str | None,
    endpoint: str,
    api_key_file: str | None,
    plain: bool,
    stay: bool,
    context: int | None,
    threads: int | None,
) -> int:
    """Chat with a model.

    A running server of ingle answers, or an engine of its own is started, which other programs can use, too: it ends
    when no chat is left and nobody has used it for five minutes (the setting keep_alive_s). The default model is
    fetched when it is used for the first time. Chats are kept in a file of yours.
    """
    if api_key_file and not endpoint:
        raise click.UsageError("--api-key-file is the key for --endpoint, which is missing.")
    given = {"model": model, "context": context, "threads": threads, "api_key_file": api_key_file}
    settings = load_settings(**given)
    for number in ending_signals():
        signal.signal(number, signal.SIG_DFL)  # nothing has to be ended in order until the chat listens
    from app.chat_backend.session import Session

    flags: dict[str, object] = {"context": context, "threads": threads}
    flags = {name: value for name, value in flags.items() if value is not None} | {"stay": stay}
    key = chosen_keys(settings)[0] if api_key_file else None
    session = Session(settings, flags, endpoint, key, question)
    if plain or not _has_screens():
        return session.run_plain()
    from app.chat_backend.guard import guarded

    return guarded(session.run_screens)


def _has_screens() -> bool:
    """Whether the terminal can show them, and a person sits at it."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not is_dumb_terminal()
