"""Check installed clients against a real server: `python -m tests.external.real_clients MODEL.gguf`.

Each client is run by `ingle with`, or with `--connect` with the settings that `ingle connect` writes.

The server has a model with scripted replies, which calls a tool of each client, under a name like that of a repository.
It takes its vocabulary from MODEL.gguf. Each client runs with a new home folder. With `--format harmony` and the chat
template of gpt-oss, the model writes as that one does. Prints a table in Markdown.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from app.connect.clients import CLIENTS
from app.connect.connection import Client
from app.connect.probe import TOOL_REQUEST
from app.process.instance import running_instances
from app.settings.settings import load_settings
from tests.clients import scripted_model
from tests.clients.scripted_model import FORMATS, Format, write_scripted_model
from tests.clients.table import read_clients
from tests.support.local_servers import answers

NAME = "org/scripted-GGUF:Q4_K_M"
CONTEXT = 40_960
POINTS = ("reply", "server", "context", "cache", "tools")
STARTING_SECONDS = 300
RUN_SECONDS = 900
PROMPT = re.compile(r"prompt of ([\d,]+) tokens")
VERSION = re.compile(r"\d+(?:\.\d+)+")
# variables by which clients use only this machine, and no files of the user
QUIET = {
    "COPILOT_OFFLINE": "true",
    "PI_OFFLINE": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLINE_SESSION_BACKEND_MODE": "local",
    "IS_TEST": "true",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
}


@dataclass(frozen=True)
class Row:
    """The findings about one client."""

    client: Client
    version: str
    statuses: Mapping[str, str]
    output: str
    seconds: float
    left: Sequence[str]  # what stayed in the folder for temporary files

    @property
    def passed(self) -> bool:
        return bool(self.statuses) and "fail" not in self.statuses.values() and not self.left

    def cells(self) -> Iterator[str]:
        prompt = PROMPT.search(self.output)
        yield from (self.client.title, self.version, prompt[1] if prompt else "-")
        yield from (self.statuses.get(point, "-") for point in POINTS)
        yield f"{self.seconds:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file; only its vocabulary is used")
    parser.add_argument("names", nargs="*", metavar="CLIENT", help="names of clients (default: all that are installed)")
    parser.add_argument("--connect", action="store_true", help="write the settings of the clients, and undo them")
    parser.add_argument("--key", default="", help="a key that the server requires")
    parser.add_argument("--format", choices=FORMATS, default="chatml", help="how the model writes replies")
    parser.add_argument("--template", type=Path, help="the chat template of a model that writes so")
    arguments = parser.parse_args()
    form = FORMATS[arguments.format]
    if arguments.template:
        form = replace(form, template=arguments.template.read_text(encoding="utf-8"))
    names = arguments.names or [one.name for one in CLIENTS]
    clients = [
        one for one in CLIENTS if one.ask and (one.setup if arguments.connect else one.launch) and one.name in names
    ]
    installed = [one for one in clients if any(map(shutil.which, one.programs))]
    print(f"not installed: {', '.join(one.name for one in clients if one not in installed) or 'none'}", file=sys.stderr)
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="clients-") as folder,
        serving(Path(folder), arguments.model, form, arguments.key) as environment,
    ):
        for client in installed:
            rows.append(row := check(client, environment, Path(folder), connects=arguments.connect))
            print(f"{client.name}\n{row.output}", *row.left, sep="\n", file=sys.stderr, flush=True)
    print("| client | version | prompt tokens |", *(f" {point} |" for point in POINTS), " time |", sep="")
    print("|---" * (len(POINTS) + 4), "|", sep="")
    for row in rows:
        print(f"| {' | '.join(row.cells())} |")
    return int(not all(row.passed for row in rows))


def check(client: Client, environment: Mapping[str, str], folder: Path, *, connects: bool) -> Row:
    """Run a client with a new home folder, and check that no temporary file and no setting stays."""
    home, scratch = folder / "homes" / client.name, folder / "scratch" / client.name
    home.mkdir(parents=True)
    scratch.mkdir(parents=True)
    own = {**environment, **QUIET, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "TMPDIR": str(scratch)}
    version = run([str(shutil.which(client.programs[0])), "--version"], own)
    started = time.monotonic()
    ingle = [sys.executable, "-m", "app"]
    if connects:
        output = run([*ingle, "connect", client.name], own)
        output += run([*ingle, "connect", client.name, "--check"], own)
        output += run([*ingle, "disconnect", client.name], own)
    else:
        output = run([*ingle, "with", client.name, "--check", "-q"], own)
    seconds = time.monotonic() - started
    found = (line.split() for line in output.splitlines() if line.split())
    statuses = {words[1]: words[0] for words in found if words[0] in ("ok", "fail", "skip") and len(words) > 1}
    number = VERSION.search(version)
    left = [path.name for path in scratch.iterdir() if path.name.startswith("ingle-")]
    left += [line for line in output.splitlines() if line.strip().startswith("Left ")]
    return Row(client, number[0] if number else "?", statuses, output, seconds, left)


def run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the output and the errors of a command."""
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_SECONDS,
    )
    return done.stdout + done.stderr


@contextmanager
def serving(folder: Path, vocabulary: Path, form: Format, key: str) -> Iterator[Mapping[str, str]]:
    """Run a server with the scripted model, and yield the environment of the programs that use it."""
    scripted_model.CALL_A_TOOL = TOOL_REQUEST
    path, state = folder / "scripted.gguf", folder / "state"
    calls = [client.calls for client in read_clients(Path("note.txt")) if client.calls]
    write_scripted_model(vocabulary.resolve(), path, calls, form)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("INGLE_")},
        "XDG_CONFIG_HOME": str(folder / "config"),
        "INGLE_STATE_DIR": str(state),
        "INGLE_KV_DISK_GB": "0",
        "INGLE_OFFLINE": "1",
        "INGLE_API_KEY": key,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "app", "serve", "--port", "0", "--model", str(path), "--context", str(CONTEXT)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--alias", NAME], env=environment, stderr=log)
    try:
        deadline, settings = time.monotonic() + STARTING_SECONDS, load_settings(state_dir=state)
        while not any(answers(one.url) for one in running_instances(settings)):
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit((folder / "log").read_text(encoding="utf-8"))
            time.sleep(0.2)
        yield environment
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
