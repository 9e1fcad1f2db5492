"""The whole command line in the tests' own process, where to import torch again would take longer than all else."""

import signal
import subprocess
import sys
from collections.abc import Mapping

import pytest
from click.testing import CliRunner

from app import cli


def ingle(environment: Mapping[str, str], *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """What a process of its own would have done. Signals and pipes need a real one."""
    with CliRunner().isolation(input=stdin, env=environment) as (out, err, *_), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ingle", *arguments])
        patch.setattr(signal, "signal", lambda *_: None)  # this process's own stay
        status = cli.main()
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())
