"""Errors of the application, and the exit status of each.

AppError
├── ModelNotFound          no such model: neither stored, nor in the catalog, nor a file
│   └── NoSuitableModel     (connect/model_choice.py) no stored model can do the job of a client
├── NoServer               no running server can do it
├── EngineFailed           an engine process ended before it served; has its exit status
├── NoSpace                not enough disk space
├── Offline                a source could not be reached
├── IntegrityError         downloaded bytes do not match their digest
├── DownloadStopped        the user stopped a download
├── InvalidSetting         an invalid value of a setting; names the origin of the value
├── TemplateError          a chat template that fails, is refused, or exceeds its limits
│   └── TemplateUnavailable   the process that renders templates gave no valid answer in time
├── ToolsUnsupported       tools for a model whose chat template does not support them
├── UnsupportedTokenizer   a vocabulary that cannot be reproduced exactly
├── TextTooLong            a text with more tokens than the caller allows
├── InvalidGrammar         a schema or grammar that cannot be compiled or enforced; names the path in it
├── GrammarsUnavailable    no process that compiles grammars can start
├── InvalidMessage         (generation/conversation.py) a message that cannot be given to a model
├── AttachmentRefused      (generation/attachments.py) an image or a document that the settings refuse
├── ReplyFailed            the engine ended a reply because a step failed
├── ReplyAborted           the engine ended a reply because the engine is shutting down
├── InvalidRequest         (server/http/errors.py)
├── CompetitorFailed, UnsuitableLoad               (bench/competitor.py)
├── BadFigures                                    (bench/figures.py)
├── HistoryTooNew, HistoryUnavailable, HistoryDamaged, NoSuchChat   (history/records.py)
│   └── HistoryInUse        other processes have the damaged history open
├── UnreadableChats                               (history/chat_import.py)
├── NotOffered                                   (chat_backend/)
├── PortTaken, NoSuchAddress                      (process/listening.py)
├── ServiceUnavailable                            (service/plan.py)
├── InvalidMCPConfig, MCPUnavailable              (mcp/)
├── NoSuchClient, NotInstalled, NotLaunchable, ContextTooShort   (connect/)
├── BadArchive                                   (commands/archive.py)
├── InvalidFile                                  (connect/documents.py)
├── NotSetUp                                     (commands/connect.py)
├── NoPreviousRun                                (commands/run_prompt.py)
└── ServerUnreachable, ServerError                (client/http.py)
"""

from engine.errors import InvalidSampling
from quant.errors import InglenookError, UnsupportedTier


class AppError(InglenookError):
    """Base class of the application's errors."""


class ModelNotFound(AppError):
    """No model has this name or path."""


class NoServer(AppError):
    """No server that can do it is running."""


class EngineFailed(AppError):
    """An engine process ended before it served. `status` is its exit status."""

    def __init__(self, message: str, remedy: str = "", status: int = 1) -> None:
        super().__init__(message, remedy)
        self.status = status


class NoSpace(AppError):
    """Not enough disk space."""


class Offline(AppError):
    """A source could not be reached."""


class IntegrityError(AppError):
    """The bytes of a file do not match their recorded digest."""


class DownloadStopped(AppError):
    """The user stopped this download. The part that has arrived is kept."""


class InvalidSetting(AppError):
    """A setting has an invalid value, or no setting has this name."""


class TemplateError(AppError):
    """A chat template failed, was refused, or exceeded its limits."""


class TemplateUnavailable(TemplateError):
    """The process that renders templates gave no valid answer in time. A retry may succeed."""


class InvalidGrammar(AppError):
    """A grammar cannot be compiled, enforced, or completed.

    `path` leads from the root of the schema to the part at fault.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path

    def within(self, field: str) -> "InvalidGrammar":
        """Return the same error with its path in the request, where the field `field` contains the grammar."""
        return InvalidGrammar(self.message, path=f"{field}{self.path}")


class GrammarsUnavailable(AppError):
    """No process that compiles grammars can start. A retry may succeed."""


class ReplyFailed(AppError):
    """The engine ended a reply because a step failed."""


class ReplyAborted(AppError):
    """The engine ended a reply because the engine is shutting down."""


class ToolsUnsupported(AppError):
    """A request has tools, and the model's chat template does not support them."""


class TextTooLong(AppError):
    """A text has more tokens than its caller allows. Counting stopped after `least` tokens."""

    def __init__(self, least: int) -> None:
        super().__init__(f"The text has more than {least:,} tokens", "Send it in parts.")
        self.least = least


class UnsupportedTokenizer(AppError):
    """A vocabulary names a tokenizer that cannot be reproduced exactly."""


EXIT_UPDATE = 10  # `ingle update --check`: a newer version exists
EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_NOT_FOUND, EXIT_NO_SPACE, EXIT_OFFLINE, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

EXIT_STATUS: dict[type[InglenookError], int] = {
    InvalidSetting: EXIT_USAGE,
    InvalidSampling: EXIT_USAGE,
    UnsupportedTier: EXIT_USAGE,
    ModelNotFound: EXIT_NOT_FOUND,
    NoServer: EXIT_NOT_FOUND,
    NoSpace: EXIT_NO_SPACE,
    Offline: EXIT_OFFLINE,
    DownloadStopped: EXIT_INTERRUPTED,
}


def exit_status(error: InglenookError) -> int:
    """Return the exit status of the process for `error`: that of its nearest base class with a status, or 1.

    An engine process that failed has stated the status.
    """
    if isinstance(error, EngineFailed):
        return error.status
    return next((EXIT_STATUS[kind] for kind in type(error).__mro__ if kind in EXIT_STATUS), EXIT_FAILURE)
