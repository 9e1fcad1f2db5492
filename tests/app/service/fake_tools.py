"""Fake tools of service managers: executables that record their arguments, and answer as a test has prescribed."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

_SCRIPT = """\
#!/bin/sh
printf '%s\\n' "$0 $*" >> {calls}
for answer in {answers}/*; do
    [ -e "$answer/words" ] || continue
    case " $* " in *" $(cat "$answer/words") "*)
        cat "$answer/out"; cat "$answer/err" >&2; exit "$(cat "$answer/status")";;
    esac
done
"""


@dataclass(frozen=True)
class FakeTools:
    """A folder of fake tools. A call without a prescribed answer succeeds without output."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, *names: str) -> "FakeTools":
        folder.mkdir()
        (folder / "answers").mkdir()
        for name in names:
            tool = folder / name
            calls, answers = folder / "calls", folder / "answers"
            tool.write_text(_SCRIPT.format(calls=shlex.quote(str(calls)), answers=shlex.quote(str(answers))))
            tool.chmod(0o755)
        return cls(folder)

    @property
    def path(self) -> str:
        """The value of PATH with which the tools are found."""
        return f"{self.folder}{os.pathsep}{os.environ['PATH']}"

    def answer(self, words: str, *, out: str = "", err: str = "", status: int = 0) -> None:
        """Prescribe the answer to calls whose arguments contain these words. The first answer that fits is given."""
        answer = self.folder / "answers" / f"{len(list((self.folder / 'answers').iterdir())):03}"
        answer.mkdir()
        for name, content in {"out": out, "err": err, "status": str(status), "words": words}.items():
            (answer / name).write_text(content)

    def forget(self) -> None:
        """Forget the recorded calls and the prescribed answers."""
        (self.folder / "calls").unlink(missing_ok=True)
        for answer in (self.folder / "answers").iterdir():
            (answer / "words").unlink()

    def calls(self) -> list[str]:
        """Return the recorded calls, each as the name of the tool and its arguments."""
        calls = self.folder / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [line.removeprefix(f"{self.folder}/") for line in lines]
