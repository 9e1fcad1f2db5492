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

    `context_length` is 0 if something else than the context is too small. `prompt_tokens` is a lower bound if the
    prompt was refused before it was encoded.
    """

    def __init__(self, message: str, remedy: str = "", *, prompt_tokens: int = 0, context_length: int = 0) -> None:
        super().__init__(message, remedy)
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length


class OutOfMemory(EngineError):
    """An allocation failed. Whoever raises it has kept nothing of what it tried."""


class NoCompiler(EngineError):
    """Triton cannot build the module that launches kernels: names what is missing."""
