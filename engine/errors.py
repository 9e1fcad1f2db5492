"""The engine's branch of the error tree, whose root is `quant.errors.InglenookError`.

EngineError
├── UnsupportedModel       an architecture or a config value that this version does not support
├── InvalidSampling        a sampling parameter that is out of bounds, by name
├── PromptTooLong          a request that can never fit, with the numbers
├── OutOfMemory            an allocation on a device or the host failed and was undone
├── DeviceLost             a GPU that fails at every call until the process ends
├── LoadStopped            the caller stopped a load
└── NoCompiler             no working C compiler, which GPU kernels need
"""

from quant.errors import InglenookError

FREE_MEMORY = "Close other programs, or choose a shorter context."  # what to do after an allocation failed


class EngineError(InglenookError):
    """The engine rejects a request or cannot continue."""


class UnsupportedModel(EngineError):
    """The checkpoint needs something that this version cannot compute."""


class InvalidSampling(EngineError):
    """A sampling parameter is out of bounds. `parameter` is its field name in `SamplingParams`."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter = parameter


class PromptTooLong(EngineError):
    """The request does not fit the context, even if it runs alone.

    `tokens` is the length of its prompt; if `is_exact` is false, it is only a lower bound. `context` is the limit of
    prompt and reply together. `longest_context` is the largest --context that this model and the available memory
    allow; 0: unknown.
    """

    def __init__(
        self,
        message: str,
        remedy: str = "",
        *,
        tokens: int = 0,
        context: int = 0,
        longest_context: int = 0,
        is_exact: bool = True,
    ) -> None:
        super().__init__(message, remedy)
        self.tokens = tokens
        self.context = context
        self.longest_context = longest_context
        self.is_exact = is_exact

    @classmethod
    def of(cls, tokens: int, context: int, longest_context: int, *, is_exact: bool = True) -> "PromptTooLong":
        """Create the error for a prompt of `tokens` tokens. The class describes the other arguments."""
        count = f"{tokens:,}" if is_exact else f"more than {tokens:,}"
        error = cls(
            f"The prompt has {count} tokens, and the context holds {context:,} including the reply",
            tokens=tokens,
            context=context,
            longest_context=longest_context,
            is_exact=is_exact,
        )
        error.remedy = "Shorten the prompt."
        if error.fits_longer_context:
            error.remedy = f"Shorten the prompt, or start with a larger --context (at most {longest_context:,} here)."
        return error

    @property
    def fits_longer_context(self) -> bool:
        """Whether the prompt would fit a larger --context that the model and the memory allow."""
        return max(self.tokens, self.context) < self.longest_context


class OutOfMemory(EngineError):
    """An allocation failed. The operation that raises it has freed everything it allocated."""


class DeviceLost(EngineError):
    """A GPU fails at every call of this process. No step can run until the process is restarted."""


class LoadStopped(EngineError):
    """The caller stopped a load, which has freed everything it allocated."""


class NoCompiler(EngineError):
    """Triton cannot build the module that launches kernels. The message names what is missing."""
