"""What can be wrong with the history as a whole."""

from app.errors import AppError


class HistoryTooNew(AppError):
    """A newer version of the program has written it."""


class HistoryUnavailable(AppError):
    """Its files cannot be opened or written."""


class HistoryDamaged(AppError):
    """Its file is damaged; the next start sets it aside and saves what can be read."""


class NoSuchChat(AppError):
    """There is no chat with that number."""
