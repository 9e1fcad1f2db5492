"""`ingle logs`: show and follow the log of the servers."""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime

import click

from app.errors import EXIT_NOT_FOUND, EXIT_OK
from app.process.server_log import LogLine, LogReader, log_path, previous_path
from app.settings.settings import load_settings
from app.text.terminal_text import sanitize

EXAMPLES = """\b
Examples:
  ingle logs
  ingle logs -f
  ingle logs -n 1000 --json | jq -r 'select(.level != "info") | .message'
"""
_POLL_SECONDS = 0.2


@click.command(epilog=EXAMPLES)
@click.option("-f", "--follow", is_flag=True, help="Print new lines as they are written, until Ctrl-C.")
@click.option(
    "-n", "--lines", "count", type=click.IntRange(min=0), default=50, help="Number of earlier lines. Default: 50."
)
@click.option("--port", type=int, help="Show only the server on this port. Default: all servers.")
@click.option("--json", "as_objects", is_flag=True, help="Print a JSON object per line.")
def logs(follow: bool, count: int, port: int | None, as_objects: bool) -> int:
    """Show the log of the servers of this account, also of those that have ended.

    Each server writes it: `ingle serve`, a service, and the engines of chats and of `ingle run`. It has no text of
    conversations. The exit status is 3 if no server has written a line.
    """
    path = log_path(load_settings().state_dir)

    def show(lines: Sequence[LogLine]) -> None:
        for line in lines:
            click.echo(json.dumps(asdict(line)) if as_objects else _words(line))

    with closing(LogReader(previous_path(path))) as previous, closing(LogReader(path)) as current:
        earlier = _of_port([*previous.read(), *current.read()], port)
        show(earlier[max(0, len(earlier) - count) :])
        while follow:
            time.sleep(_POLL_SECONDS)
            show(_of_port(current.read(), port))
    if not earlier:
        click.echo(f"No server has written a line to {path}.", err=True)
        return EXIT_NOT_FOUND
    return EXIT_OK


def _of_port(lines: Sequence[LogLine], port: int | None) -> Sequence[LogLine]:
    return [line for line in lines if port in (None, line.port)]


def _words(line: LogLine) -> str:
    """Return a line as text: its local time, the port of its server, its level unless it is info, and its message."""
    at = datetime.fromisoformat(line.time).astimezone()
    level = "" if line.level == "info" else f"{line.level}: "
    return f"{at:%Y-%m-%d %H:%M:%S} {line.port} {level}{sanitize(line.message)}"
