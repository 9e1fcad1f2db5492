"""The application's branch of the error tree, and the exit status of each error.

AppError
├── ModelNotFound          no such model: neither stored, nor in the catalog, nor a file
├── NoSpace                the disk is too full for what was asked
├── Offline                a source could not be reached
├── IntegrityError         downloaded bytes are not the promised ones
├── DownloadStopped        somebody asked for a download to end
├── InvalidSetting         a configuration value that makes no sense; names where it came from
├── TemplateError          a chat template that fails, is refused, or runs past its limits
│   └── TemplateUnavailable   the process that renders them gave no answer in time
├── ToolsUnsupported       tools for a model that cannot be told of them
├── UnsupportedTokenizer   a vocabulary that cannot be reproduced exactly
├── TextTooLong            a text with more tokens than the caller allows; says how many at least
├── InvalidGrammar         a schema or grammar that cannot be compiled or enforced; names the place
├── GrammarsUnavailable    no process that compiles grammars can start
├── InvalidMessage         (generation/conversation.py) a message that cannot be given to a model
├── ReplyFailed            the engine gave a reply up because a step failed
├── ReplyAborted           the engine ended a reply because it is being stopped
├── InvalidRequest         (server/errors.py)
├── CompetitorFailed, UnsuitableLoad               (bench/competitor.py)
├── HistoryTooNew, HistoryUnavailable, HistoryDamaged, NoSuchChat   (history/records.py)
│   └── HistoryInUse        other processes have the damaged history open
├── UnreadableChats                               (history/chat_import.py)
├── EngineFailed, NotOffered                      (chat_backend/)
├── PortTaken, NoSuchAddress                      (process/listening.py)
├── InvalidMCPConfig, MCPUnavailable              (mcp/)
└── ServerUnreachable, ServerError                (client/http.py)
"""

from engine.errors import InvalidSampling
from quant.errors import InglenookError, UnsupportedTier


class AppError(InglenookError):
    """The application cannot do what was asked."""


class ModelNotFound(AppError):
    """No such model."""


class NoSpace(AppError):
    """Not enough disk space."""


class Offline(AppError):
    """A source could not be reached."""


class IntegrityError(AppError):
    """Bytes do not match their recorded digest."""


class DownloadStopped(AppError):
    """Somebody asked for this download to end; what has arrived is kept."""


class InvalidSetting(AppError):
    """A setting has a value that makes no sense."""


class TemplateError(AppError):
    """A chat template failed, was refused, or ran past its limits."""


class TemplateUnavailable(TemplateError):
    """The process that renders templates gave no answer in time, or none that makes sense: it may, another time."""


class InvalidGrammar(AppError):
    """A grammar cannot be compiled, enforced or completed. `place` is the path of the part at fault, from the root of
    the schema."""

    def __init__(self, message: str, *, place: str = "") -> None:
        super().__init__(message)
        self.place = place

    def within(self, field: str) -> "InvalidGrammar":
        """The same error with its place as a path of the request, whose `field` has the grammar."""
        return InvalidGrammar(self.message, place=f"{field}{self.place}")


class GrammarsUnavailable(AppError):
    """No process that compiles grammars can start: it may, another time."""


class ReplyFailed(AppError):
    """The engine gave a reply up because a step failed."""


class ReplyAborted(AppError):
    """The engine ended a reply because it is being stopped."""


class ToolsUnsupported(AppError):
    """Tools, for a model whose chat template does not tell it of them."""


class TextTooLong(AppError):
    """A text has more tokens than its caller allows: `least` or more."""

    def __init__(self, least: int) -> None:
        super().__init__(f"The text has more than {least:,} tokens", "Send it in parts.")
        self.least = least


class UnsupportedTokenizer(AppError):
    """A vocabulary names a tokenizer that cannot be reproduced exactly."""


EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_NOT_FOUND, EXIT_NO_SPACE, EXIT_OFFLINE, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

EXIT_STATUS: dict[type[InglenookError], int] = {
    InvalidSetting: EXIT_USAGE,
    InvalidSampling: EXIT_USAGE,
    UnsupportedTier: EXIT_USAGE,
    ModelNotFound: EXIT_NOT_FOUND,
    NoSpace: EXIT_NO_SPACE,
    Offline: EXIT_OFFLINE,
    DownloadStopped: EXIT_INTERRUPTED,
}


def exit_status(error: InglenookError) -> int:
    """The process exit status for `error`: that of the nearest class in its line that has one, else 1."""
    return next((EXIT_STATUS[kind] for kind in type(error).__mro__ if kind in EXIT_STATUS), EXIT_FAILURE)
