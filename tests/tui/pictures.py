"""Takes pictures of the chat with a real engine in a real terminal: `python -m tests.tui.pictures MODEL.gguf docs`.

The terminal is tmux; rich converts its contents to SVG.
"""

import argparse
import io
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[2]
COLUMNS, LINES = 112, 36
SESSION = "ingle-pictures"
QUESTIONS = (
    "Name three ways to keep a house warm in winter.",
    "Write a Python function that says whether a number is even. Only the code.",
)
LONG = "Tell me a long story about a fireplace, an old house and a cat that likes both of them."
LOOK = TerminalTheme((23, 20, 18), (232, 225, 217), [(0, 0, 0)] * 8)  # default colors of the terminal
PATIENCE = 120.0  # time limit in seconds


def tmux(*arguments: str) -> str:
    return subprocess.run(["tmux", *arguments], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def screen(*, colors: bool = False) -> str:
    return tmux("capture-pane", "-p", "-t", SESSION, *(["-e", "-N"] if colors else []))


def wait_for(condition: Callable[[str], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition(screen()):
        assert time.monotonic() < deadline, screen()
        time.sleep(0.2)


def picture(path: Path) -> None:
    time.sleep(1.0)  # a new screen is drawn more than once
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(screen(colors=True).rstrip("\n")), end="", soft_wrap=True)
    svg = console.export_svg(title="ingle", theme=LOOK)
    # remove the font, which viewers would download
    path.write_text(re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")


def say(text: str, replies: int) -> None:
    tmux("send-keys", "-t", SESSION, "-l", text)
    tmux("send-keys", "-t", SESSION, "Enter")
    wait_for(lambda shown: shown.count("tok/s") >= replies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="SmolLM2 135M Instruct as a GGUF file.")
    parser.add_argument("folder", type=Path, help="Where chat.svg and engine.svg are written.")
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ingle-pictures-") as place:
        own = [f"INGLE_STATE_DIR={place}", f"INGLE_MODELS_DIR={given.model.absolute().parent}", "COLORTERM=truecolor"]
        command = ["env", *own, sys.executable, "-m", "app", "chat", "--model", "smollm2:135m"]
        tmux("new-session", "-d", "-s", SESSION, "-x", str(COLUMNS), "-y", str(LINES), *command)
        try:
            wait_for(lambda shown: "smollm2:135m" in shown and ", free " in shown)
            for replies, question in enumerate(QUESTIONS, 1):
                say(question, replies)
            picture(given.folder / "chat.svg")
            tmux("send-keys", "-t", SESSION, "-l", LONG)
            tmux("send-keys", "-t", SESSION, "Enter", "F3")
            wait_for(lambda shown: "(this chat)" in shown)
            time.sleep(6.0)  # wait until the throughput graphs have values
            picture(given.folder / "engine.svg")
        finally:
            tmux("kill-session", "-t", SESSION)


if __name__ == "__main__":
    main()
