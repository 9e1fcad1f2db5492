"""Kill `connect` and `disconnect` at each of their writes, and trace which files they write.

    python -m tests.torture.killed_connect [--most N]

A child process writes the settings of a client and is killed with SIGKILL at its n-th write, for all n. Then each file
must have its old content or its new one, and `disconnect` must restore the files, or all but the change of another
program. All paths that the children write must be settings files or records. Prints the number of kills.
"""

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from app.connect.connection import Target
from app.connect.documents import Item
from app.connect.undo import Undo

CLIENT = "client"
WRITES_OF_A_STEP, FEWEST_WRITES = 100, 14  # a step needs at most and at least this number of writes
WRITES = ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod")  # audit events
FILES = {
    "settings.json": '{\r\n  // mine\r\n  "theme": "light", // x\r\n}\r\n',
    "config.yaml": "name: mine # note\nmodels:\n  - name: other\n",
    "profile.toml": None,
}

State = Mapping[str, bytes | None]
Step = Callable[[Path], None]


def targets(folder: Path, model: str) -> Sequence[Target]:
    item = {"name": "ingle", "model": model}
    return (
        Target(folder / "settings.json", "json", {("theme",): "dark", ("env", "MODEL"): model}),
        Target(folder / "config.yaml", "yaml", {("name",): model, ("models", Item("name", "ingle")): item}),
        Target(folder / "profile.toml", "text", {(): f'model = "{model}"\n'}),
    )


def undo_of(folder: Path) -> Undo:
    return Undo(folder.parent / "state" / "connect")


def connect(folder: Path, model: str = "first") -> None:
    undo_of(folder).connect(CLIENT, targets(folder, model))


def connect_another(folder: Path) -> None:
    connect(folder, "second")


def disconnect(folder: Path) -> None:
    undo_of(folder).disconnect(CLIENT)


def edit(folder: Path) -> None:
    """Change a file as another program does."""
    path = folder / "settings.json"
    path.write_bytes(b"// new\r\n" + path.read_bytes())


SCENARIOS: Mapping[str, Sequence[Step]] = {
    "connect": (connect,),
    "connect another model": (connect, connect_another),
    "connect another model after a change": (connect, edit, connect_another),
    "disconnect": (connect, disconnect),
    "disconnect after a change": (connect, edit, disconnect),
}


def state_of(folder: Path) -> State:
    return {name: path.read_bytes() if (path := folder / name).exists() else None for name in FILES}


def prepare(folder: Path, steps: Sequence[Step]) -> None:
    """Create the files, and run all steps but the last."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        if text is not None:
            (folder / name).write_bytes(text.encode())
    for step in steps[:-1]:
        step(folder)


def run_until(number: int, step: Step, folder: Path) -> Sequence[str]:
    """Run a step in this process, and kill the process at a write. Returns the paths written if it ends before."""
    paths: list[str] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event not in WRITES:
            return
        flags = arguments[2] if event == "open" and len(arguments) > 2 else os.O_WRONLY
        if isinstance(flags, int) and not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        path = str(arguments[1] if event == "os.rename" else arguments[0])
        paths.append(f"{path} in parts" if event == "open" and Path(path).name in FILES else path)
        if len(paths) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    step(folder)
    return paths


def killed_at(number: int, step: Step, folder: Path) -> bool:
    """Run a step in a child process that is killed at a write. Returns whether it was. Raises if it fails otherwise."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            paths = run_until(number, step, folder)
            outside = [path for path in paths if not is_allowed(Path(path), folder)]
            status = 3 if outside else 0
            print(*outside, sep="\n", end="", file=sys.stderr)
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0, f"write {number}: status {os.waitstatus_to_exitcode(status)}"
    return False


def is_allowed(path: Path, folder: Path) -> bool:
    """Whether connect may write a path: a settings file, its unfinished form, or a record."""
    is_settings_file = path.parent == folder and re.fullmatch(rf"({'|'.join(FILES)})(\.\d+\.partial)?", path.name)
    return bool(is_settings_file) or path.is_relative_to(folder.parent / "state") or path == folder.parent


def check(folder: Path, steps: Sequence[Step], before: State, after: State) -> None:
    """Check the files after a kill, and that disconnect restores them."""
    now = state_of(folder)
    assert all(content in (before[name], after[name]) for name, content in now.items()), now
    disconnect(folder)
    expected = {name: None if text is None else text.encode() for name, text in FILES.items()}
    if edit in steps:
        expected["settings.json"] = b"// new\r\n" + (expected["settings.json"] or b"")
    assert state_of(folder) == expected, state_of(folder)


def kills_of(steps: Sequence[Step], folder: Path, numbers: Sequence[int]) -> int:
    """Kill the last step at each of these writes. Returns the number of kills."""
    prepare(folder, steps)
    before = state_of(folder)
    steps[-1](folder)
    after = state_of(folder)
    kills = 0
    for number in numbers:
        prepare(folder, steps)
        is_killed = killed_at(number, steps[-1], folder)
        kills += is_killed
        check(folder, steps, before, after)
        if not is_killed:
            break
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=100, help="kills of each step, at random writes; 100: at all")
    most = parser.parse_args().most
    with tempfile.TemporaryDirectory(prefix="killed-connect-") as top:
        folder = Path(top, "run", "home")
        for name, steps in SCENARIOS.items():
            numbers: Sequence[int] = range(1, WRITES_OF_A_STEP)
            if most < FEWEST_WRITES:
                numbers = sorted(random.sample(numbers[:FEWEST_WRITES], most))
            kills = kills_of(steps, folder, [*numbers, WRITES_OF_A_STEP])
            print(f"{name}: killed at {kills} writes; files were whole and could be restored")


if __name__ == "__main__":
    main()
