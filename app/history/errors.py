"""What can be wrong with the history as a whole."""

from app.errors import AppError


class HistoryTooNew(AppError):
    """A newer version of the program has written it."""


class HistoryUnavailable(AppError):
    """Its files cannot be opened or written."""


class HistoryDamaged(AppError):
    """Its file is damaged."""


class HistoryInUse(HistoryDamaged):
    """Its file is damaged and cannot be replaced while other processes have it open."""


class NoSuchChat(AppError):
    """There is no chat with that number."""
