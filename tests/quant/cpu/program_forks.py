"""Run programs in forks of one process that has imported numba, which saves the import for each program.

Each line of JSON on standard input names an output file, the program, and its arguments. The answer is a line with the
exit status.
"""

import json
import os
import runpy
import sys
import traceback

import numba  # noqa: F401 - the slowest import

from quant.cpu import kernel, native, tiers  # noqa: F401


def run(output: str, program: str, arguments: list[str]) -> int:
    """Run a program in a fork and return its exit status, negative after a signal."""
    child = os.fork()
    if child == 0:
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(target, sys.stdout.fileno())
        os.dup2(target, sys.stderr.fileno())
        sys.argv = [program, *arguments]
        status = 1
        try:
            runpy.run_path(program, run_name="__main__")
            status = 0
        except BaseException:  # noqa: BLE001 - the fork must exit in any case
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for line in sys.stdin:
        output, program, *arguments = json.loads(line)
        print(run(output, program, arguments), flush=True)
