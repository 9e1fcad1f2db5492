"""`ingle` and `ingle chat`: chat in the terminal, with screens or line by line."""

import signal
import sys
from pathlib import Path

import click

from app.commands.options import context_option, model_option, threads_option
from app.process.signals import ending_signals
from app.settings.api_keys import chosen_keys
from app.settings.settings import is_dumb_terminal, load_settings

EXAMPLES = """\b
Examples:
  ingle
  ingle chat --model qwen3:4b
  ingle -c
  ingle chat --plain
  ingle chat --endpoint http://gpu-box:8000/v1 --api-key-file ./key
"""


@click.command(epilog=EXAMPLES)
@click.argument("question", required=False, default="")
@model_option
@click.option(
    "--endpoint",
    metavar="URL",
    default="",
    help="Chat with another server that speaks the OpenAI API, such as http://gpu-box:8000/v1. "
    "Default: ingle's own engine.",
)
@click.option("--api-key-file", metavar="FILE", help="File with the API key of that server.")
@click.option("--continue", "-c", "continues", is_flag=True, help="Open the last chat, with its model.")
@click.option("--resume", "resumes", is_flag=True, help="Choose an earlier chat from a list.")
@click.option("--private", "is_private", is_flag=True, help="Start with a private chat: nothing of it is saved.")
@click.option(
    "--mcp-config",
    metavar="FILE",
    type=click.Path(resolve_path=True, path_type=Path),
    help="File with tool servers (MCP), in addition to the default mcp.json.",
)
@click.option("--plain", is_flag=True, help="Chat line by line: for screen readers, dumb terminals, and pipes.")
@click.option("--stay", is_flag=True, help="Keep the engine running after the last chat ends.")
@context_option
@threads_option
def chat(
    question: str,
    model: str | None,
    endpoint: str,
    api_key_file: str | None,
    continues: bool,
    resumes: bool,
    is_private: bool,
    mcp_config: Path | None,
    plain: bool,
    stay: bool,
    context: int | None,
    threads: int | None,
) -> int:
    """Chat with a model. QUESTION is sent first, if given.

    A running server of ingle answers. If there is none, the chat starts an engine, which other programs can use as
    well. The engine ends when no chat is open and no program has used it for five minutes (setting keep_alive_s). The
    default model is downloaded on first use. Chats are saved on this machine.
    """
    if api_key_file and not endpoint:
        raise click.UsageError("--api-key-file needs --endpoint: it holds the API key of that server.")
    if mcp_config is not None and not mcp_config.is_file():
        raise click.UsageError(f"--mcp-config: there is no file {mcp_config}.")
    openings = {"last": continues, "choice": resumes, "private": is_private}  # values of `Opening`
    chosen = [opening for opening, is_chosen in openings.items() if is_chosen]
    if len(chosen) > 1:
        raise click.UsageError(
            "--continue opens the last chat, --resume lists all, and --private starts one. Use one of them."
        )
    given = {"model": model, "context": context, "threads": threads, "api_key_file": api_key_file}
    settings = load_settings(**given)
    for number in ending_signals():
        signal.signal(number, signal.SIG_DFL)  # no cleanup is needed before the chat installs its own handlers
    from app.chat_backend.session import Opening, Session

    flags: dict[str, object] = {"context": context, "threads": threads}
    flags = {name: value for name, value in flags.items() if value is not None} | {"stay": stay}
    key = chosen_keys(settings)[0] if api_key_file else None
    opening = Opening(chosen[0]) if chosen else Opening.NEW
    session = Session(settings, flags, endpoint, key, question, opening, mcp_config)
    if plain or not _has_screens():
        return session.run_plain()
    from app.chat_backend.guard import run_guarded

    return run_guarded(session.run_screens)


def _has_screens() -> bool:
    """Whether stdin and stdout are a terminal that can show screens."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not is_dumb_terminal()
