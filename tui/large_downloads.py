"""Decides which downloads need the user's confirmation, and writes the question."""

from tui import figures
from tui.engine_types import ModelInfo

LARGE = 1_000_000_000  # downloads of at least this many bytes need confirmation

FIT_BY_SIZE = {None: "Fit unknown", True: "Probably fits", False: "Probably too large"}


def can_load(model: ModelInfo) -> bool:
    """Whether the model can be loaded without a download."""
    return model.installed or model.elsewhere


def needs_confirmation(model: ModelInfo, free: int | None) -> bool:
    """Return whether the user must confirm a download.

    The user must confirm if the download is large or of unknown size, or if the model does not fit the memory or the
    `free` disk space. A download that the engine has already started needs no confirmation.
    """
    left = _left(model)
    if can_load(model) or model.fetching:
        return False
    return left is None or left > LARGE or model.fits is False or not _has_space(left, free)


def describe_download(model: ModelInfo, free: int | None, verdict: str = "") -> str:
    """Describe a download in lines: its size, the `free` disk space in bytes, and whether the model fits the memory."""
    size = figures.size(model.size) or "unknown"
    arrived = f", {figures.size(model.arrived)} downloaded" if model.arrived else ""
    disk = figures.size(free) or "unknown"
    lack = "" if _has_space(_left(model), free) else " (not enough)"
    return "\n".join((
        model.name,
        "",
        f"Size:      {'about ' * model.is_estimate}{size}{arrived}",
        f"Free disk: {disk}{lack}",
        f"Memory:    {verdict or FIT_BY_SIZE[model.fits]}",
    ))  # fmt: skip


def _left(model: ModelInfo) -> int | None:
    """Return the number of bytes still to download, or None if unknown."""
    return None if model.size is None else model.size - (model.arrived or 0)


def _has_space(left: int | None, free: int | None) -> bool:
    return left is None or free is None or left <= free
