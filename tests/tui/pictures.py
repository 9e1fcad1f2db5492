"""Take the pictures of README and docs: `python -m tests.tui.pictures MODEL.gguf docs`.

The first screen, the models, and the engine are those of a real engine in a real terminal: tmux, whose contents rich
converts to SVG. The answer is written in advance, because the small model writes no tables. Each picture is dark and
light.
"""

import argparse
import asyncio
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from tests.tui.pilots import Chatting
from tests.tui.scripted_client import ScriptedClient
from tests.tui.snapshots import settled
from tui.app import ChatApp
from tui.widgets.status_line import StatusLine

ROOT = Path(__file__).parents[2]
COLUMNS, LINES = 100, 30
SESSION = "ingle-pictures"
LONG = "Tell me a long story about a fireplace, an old house and a cat that likes both of them."
THEMES = {
    "dark": ("hearth-dark", TerminalTheme((23, 20, 18), (232, 225, 217), [(0, 0, 0)] * 8)),
    "light": ("hearth-light", TerminalTheme((251, 247, 242), (43, 35, 32), [(0, 0, 0)] * 8)),
}
PATIENCE = 120.0  # seconds
MODEL = "qwen3:4b"
QUESTION = "Compare two ways to count words in Python, and show the better one."
ANSWER = """\
| way | speed | memory |
|---|---|---|
| a loop over a `dict` | slow | one entry per word |
| `collections.Counter` | fast, in C | one entry per word |

`Counter` is shorter, and sorts for you:

```python
from collections import Counter

def most_common(text: str, limit: int = 3) -> list[tuple[str, int]]:
    return Counter(text.lower().split()).most_common(limit)
```

It returns pairs of a word and its count, the most frequent first.
"""


def tmux(*arguments: str) -> str:
    return subprocess.run(["tmux", *arguments], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def screen(*, colors: bool = False) -> str:
    return tmux("capture-pane", "-p", "-t", SESSION, *(["-e", "-N"] if colors else []))


def wait_for(condition: Callable[[str], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition(screen()):
        assert time.monotonic() < deadline, screen()
        time.sleep(0.2)


def write(path: Path, svg: str) -> None:
    """Write a picture that downloads no font."""
    path.write_text(re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")


def take(path: Path, look: TerminalTheme) -> None:
    """Take a picture of the terminal."""
    time.sleep(1.0)  # because a new screen is drawn more than once
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(screen(colors=True).rstrip("\n")), end="", soft_wrap=True)
    write(path, console.export_svg(title="ingle", theme=look))


def press(*keys: str) -> None:
    tmux("send-keys", "-t", SESSION, *keys)


def take_real(model: Path, folder: Path, name: str) -> None:
    """Take the pictures of a chat with a real engine."""
    theme, look = THEMES[name]
    with tempfile.TemporaryDirectory(prefix="ingle-pictures-") as state:
        own = [f"INGLE_STATE_DIR={state}", f"INGLE_MODELS_DIR={model.absolute().parent}", f"INGLE_THEME={theme}"]
        command = ["env", *own, "COLORTERM=truecolor", sys.executable, "-m", "app", "chat", "--model", "smollm2:135m"]
        tmux("new-session", "-d", "-s", SESSION, "-x", str(COLUMNS), "-y", str(LINES), *command)
        try:
            wait_for(lambda shown: "is ready" in shown and "free" in shown)
            take(folder / f"start-{name}.svg", look)
            press("F2")
            wait_for(lambda shown: "in use" in shown.lower() and "context" in shown)
            take(folder / f"models-{name}.svg", look)
            press("Escape")
            wait_for(lambda shown: "Ask anything" in shown)
            tmux("send-keys", "-t", SESSION, "-l", LONG)
            press("Enter")
            wait_for(lambda shown: "esc to stop" in shown)
            press("F3")
            wait_for(lambda shown: "this chat" in shown)
            time.sleep(3.0)  # until the throughput graphs have values
            take(folder / f"engine-{name}.svg", look)
        finally:
            tmux("kill-session", "-t", SESSION)


async def take_answer(path: Path, theme: str) -> None:
    """Take a picture of a chat whose answer has a table and code."""
    client = ScriptedClient()
    client.keep("Plan a garden", "Where do tomatoes grow best?", "In the sun.", pinned=True)
    shown = client.keep("Counting words in Python", QUESTION, ANSWER)
    chat = client.chats.chats[shown]
    # no cost: nothing was measured
    named = (replace(one, model=MODEL if one.model else "", usage=None) for one in chat.messages)
    client.chats.chats[shown] = replace(chat, messages=tuple(named))
    client.engine.loads.set()
    app = ChatApp(client, chat=shown, theme=theme)
    async with app.run_test(size=(COLUMNS, LINES)) as pilot:
        chatting = Chatting(app, pilot, client)
        status = chatting.screen.query_one(StatusLine)
        await chatting.until(lambda: len(chatting.views()) > 0 and status.budget is not None)
        status.model = MODEL
        await settled(chatting)
        write(path, app.export_screenshot(title="ingle"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="SmolLM2 135M Instruct as a GGUF file.")
    parser.add_argument("folder", type=Path, help="Where the pictures are written.")
    given = parser.parse_args()
    os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    given.folder.mkdir(exist_ok=True)
    for name, (theme, _) in THEMES.items():
        asyncio.run(take_answer(given.folder / f"chat-{name}.svg", theme))
        take_real(given.model, given.folder, name)


if __name__ == "__main__":
    main()
