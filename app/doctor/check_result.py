"""The result of a check of `ingle doctor`."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. `fail` means that ingle cannot work, `warn` that a feature is missing or slow."""

    name: str  # what was checked
    status: Status
    found: str  # what the check found
    remedy: str = ""  # what to do about it; empty if there is nothing to do
