"""Run the command line inside the test process, because a new process would spend most of its time importing torch."""

import signal
import subprocess
import sys
from collections.abc import Mapping

import pytest
from click.testing import CliRunner

from app import cli


def ingle(environment: Mapping[str, str], *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run `ingle` and return the result of the command. Tests of signals and pipes need a real process instead."""
    with CliRunner().isolation(input=stdin, env=environment) as (out, err, *_), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ingle", *arguments])
        # the command must not replace the signal handlers of the test process
        patch.setattr(signal, "signal", lambda *_: None)
        status = cli.main()
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())
