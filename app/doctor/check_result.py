"""What a check of `ingle doctor` found: the noun."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class CheckResult:
    """What one check found. `fail` means that ingle cannot work, `warn` that something will be missing."""

    name: str
    status: Status
    found: str
    remedy: str = ""
