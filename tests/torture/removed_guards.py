"""Remove the guards of the product, one at a time, from a copy of the source, and check that a test fails for each.

    python -m tests.torture.removed_guards [NAME ...]

The program exits with status 1 if no test notices that a guard is missing, or if the tests fail with all guards.
"""

import sys

from tests.torture import chat_guards, engine_guards, model_guards, server_guards
from tests.torture.planting import run

GUARDS = {**server_guards.GUARDS, **model_guards.GUARDS, **engine_guards.GUARDS, **chat_guards.GUARDS}


if __name__ == "__main__":
    sys.exit(run(GUARDS, __doc__))
