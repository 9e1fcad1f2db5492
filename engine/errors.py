"""The engine's branch of the error tree (its root is `quant.errors.InglenookError`).

EngineError
├── UnsupportedModel       an architecture or a config value this version does not run
├── InvalidSampling        a sampling parameter out of its bounds; names the parameter
├── PromptTooLong          a request that can never fit, with the numbers
├── OutOfMemory            a device or the host had none left; what was tried is undone
└── NoCompiler             kernels for GPUs need a C compiler, once, and there is none that works
"""

from quant.errors import InglenookError


class EngineError(InglenookError):
    """The engine refuses or cannot continue."""


class UnsupportedModel(EngineError):
    """The checkpoint asks for something that this version does not compute."""


class InvalidSampling(EngineError):
    """A sampling parameter is out of bounds. `parameter` is its field name in `SamplingParams`."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter = parameter


class PromptTooLong(EngineError):
    """The request cannot fit the context, even alone.

    `tokens` is what its prompt has; unless `is_exact`, it has more than that. `context` is what prompt and reply may
    have together, and `longest_context` the most that --context could make of it here. 0: not known.
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
        """For a prompt of so many tokens: see the class."""
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
        """Whether a larger --context makes room for it: the model and the memory allow that."""
        return max(self.tokens, self.context) < self.longest_context


class OutOfMemory(EngineError):
    """An allocation failed. Whoever raises it has kept nothing of what it tried."""


class NoCompiler(EngineError):
    """Triton cannot build the module that launches kernels: names what is missing."""
