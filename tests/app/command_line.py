"""Run the command line in the tests' process, because importing torch in a new process takes longer than the rest."""

import signal
import subprocess
import sys
from collections.abc import Mapping

import pytest
from click.testing import CliRunner

from app import cli


def ingle(environment: Mapping[str, str], *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Return the result that a new process would have. Tests of signals and pipes need a real process."""
    with CliRunner().isolation(input=stdin, env=environment) as (out, err, *_), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ingle", *arguments])
        patch.setattr(signal, "signal", lambda *_: None)  # keeps the signal handlers of this process
        status = cli.main()
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())
