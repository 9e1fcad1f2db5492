"""Measures the CPU time that the chat's own Markdown widgets save: `python -m tests.tui.layers`.

Each measurement is a process that shows one reply of a scripted client in a terminal of 120 x 40 cells. Each round runs
all variants: first all own widgets, then each widget replaced with Textual's own. For each kind of text and each rate,
prints the fraction of a core (median of the rounds, minimum, and maximum), and the number of frames drawn per second.
"""

import argparse
import asyncio
import os
import select
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from textual._compositor import Compositor
from textual.widgets import Markdown

from tests.support.terminal_screen import Terminal, python
from tests.tui.scripted_client import ScriptedClient
from tests.tui.speed import KINDS, FastReplies
from tui.app import ChatApp
from tui.widgets.conversation import Conversation
from tui.widgets.document import Document

ALL = "all"
RATES = (30, 300)  # tokens per second


def without_blocks(*names: str) -> Callable[[], None]:
    """Show blocks of these types with Textual's own widgets."""
    return lambda: Document.BLOCKS.update({name: Markdown.BLOCKS[name] for name in names})


class Layer(NamedTuple):
    remove: Callable[[], None]
    kinds: Sequence[str]  # kinds of text in which the widget occurs


LAYERS: Mapping[str, Layer] = {
    "list": Layer(without_blocks("bullet_list_open", "ordered_list_open"), ["blocks", "list"]),
    "table": Layer(without_blocks("table_open"), ["blocks", "table"]),
}


class Cost(NamedTuple):
    core: float  # fraction of one core
    frames: float  # frames per second


async def watched(app: ChatApp, seconds: float) -> Cost:
    """Return the cost of showing a reply, from its first frame on."""
    frames = 0
    render = Compositor.render_update

    def counted(self: Compositor, *given: object, **named: object) -> object:
        nonlocal frames
        update = render(self, *given, **named)  # type: ignore[arg-type]
        frames += update is not None
        return update

    while app.focused is None:
        await asyncio.sleep(0.01)
    conversation = app.screen.query_one(Conversation)
    conversation.composer.area.write("go")
    app.simulate_key("enter")
    while not (conversation.current_reply and conversation.current_reply.message):
        await asyncio.sleep(0.01)
    Compositor.render_update = counted  # type: ignore[method-assign, assignment]
    cpu, began = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    spent, passed = time.process_time() - cpu, time.monotonic() - began
    app.exit()
    return Cost(spent / passed, frames / passed)


async def show(layer: str, kind: str, rate: int, seconds: float) -> Cost:
    if layer != ALL:
        LAYERS[layer].remove()
    client = ScriptedClient()
    client.replies = FastReplies(client.chats)
    client.replies.kind, client.replies.rate, client.replies.tokens = kind, rate, round(2 * rate * seconds)
    client.engine.loads.set()
    app = ChatApp(client)
    watching = asyncio.create_task(watched(app, seconds))
    await app.run_async()
    return await watching


def measured(layer: str, kind: str, rate: int, seconds: float) -> Cost:
    """Run a measurement in a child process. Its output is read as a terminal would read it."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "cost")
        given = ["--child", layer, kind, str(rate), str(result), "--seconds", str(seconds)]
        terminal = Terminal(python("-m", "tests.tui.layers", *given), {"COLORTERM": "truecolor"})
        terminal.resize(120, 40)
        while not result.exists():
            if select.select([terminal.master], [], [], 0.1)[0]:
                os.read(terminal.master, 1 << 16)
        terminal.ended()
        core, frames = result.read_text().split()
        return Cost(float(core), float(frames))


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=12.0)
    options.add_argument("--of", nargs="*", choices=KINDS, default=list(KINDS), help="kinds of text")
    options.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.child:
        layer, kind, rate, result = chosen.child
        cost = asyncio.run(show(layer, kind, int(rate), chosen.seconds))
        whole = Path(f"{result}.part")
        whole.write_text(f"{cost.core} {cost.frames}")
        whole.rename(result)
        return
    found: dict[tuple[int, str, str], list[Cost]] = defaultdict(list)
    for number in range(1, chosen.rounds + 1):
        for rate in RATES:
            for kind in chosen.of:
                for layer in (ALL, *(name for name, one in LAYERS.items() if kind in one.kinds)):
                    found[rate, kind, layer].append(measured(layer, kind, rate, chosen.seconds))
        print(f"after {number} rounds:", flush=True)
        for (rate, kind, layer), costs in found.items():
            core, frames = (statistics.median(values) for values in zip(*costs, strict=True))
            spread = f"{min(cost.core for cost in costs):.3f} to {max(cost.core for cost in costs):.3f}"
            print(
                f"  {rate:3} a second, {kind:<6} without {layer:<10} {core:.3f} of a core ({spread}),"
                f" {frames:4.1f} frames a second",
                flush=True,
            )


if __name__ == "__main__":
    main()
