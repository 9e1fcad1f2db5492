"""The one model of a server: its names, its details, and the check that a request names it."""

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from app.models.details import ModelDetails
from app.server.http.errors import InvalidRequest
from quant.errors import InglenookError

ANY_MODEL = "*"  # target of an alias that refers to the served model, whichever it is


class ServedModel:
    """The one model of a server."""

    def __init__(
        self,
        name: str,
        context_length: int,
        vocab_size: int,
        aliases: Mapping[str, str],
        describe: Callable[[], ModelDetails] | None = None,
        *,
        other_names: Sequence[str] = (),
        loaded_as: str = "",
    ) -> None:
        """Set the names of the model.

        `other_names` are listed after `name`. `loaded_as` is the name under which the model was loaded, such as a path:
        requests may use it, and no list contains it. `aliases` maps further names to the name of a model, or to
        ANY_MODEL; aliases of other models are ignored. An alias with a * matches names by pattern, and is not listed.
        `describe` is slow; it is called once, when the details are needed.
        """
        self.name = name
        self.loaded_as = loaded_as or name
        self.context_length = context_length  # tokens of a prompt and its reply together
        self.vocab_size = vocab_size
        self.created = int(time.time())
        own = (name, *other_names, self.loaded_as)
        others = [alias for alias, meant in aliases.items() if meant in (*own, ANY_MODEL)]
        listed = (name, *other_names, *(alias for alias in others if "*" not in alias))
        self.names: Sequence[str] = tuple(dict.fromkeys(listed))
        self._patterns = [alias for alias in others if "*" in alias]
        self._describe_lock = asyncio.Lock()  # only the first caller uses a thread; the others wait
        self._describe = describe or functools.partial(ModelDetails.unknown, self.loaded_as)
        self._details: ModelDetails | None = None

    def has_name(self, name: str) -> bool:
        return self._is_listed(name) or name == self.loaded_as

    def _is_listed(self, name: str) -> bool:
        return name in self.names or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def reply_name(self, requested: str | None) -> str:
        """Return the model name for the reply to a request for `requested`.

        It is the requested name if that is listed, and otherwise the first name of the model. Raises InvalidRequest for
        the name of another model.
        """
        self.check(requested)
        return requested if requested and self._is_listed(requested) else self.name

    def check(self, name: str | None) -> None:
        """Raise InvalidRequest for the name of another model. An empty name or None means this model."""
        if name and not self.has_name(name):
            message = f"The model {name!r} does not exist here"
            remedy = f"This server has {', '.join(map(repr, self.names))}."
            raise InvalidRequest(message, remedy, parameter="model", code="model_not_found", status=404)

    async def parameters(self) -> int | None:
        """Return the number of the model's weights; None if it is unknown, or if the files cannot be read any more."""
        with suppress(InglenookError, OSError):
            return (await self.details()).parameters or None
        return None

    async def details(self) -> ModelDetails:
        """Return the details that the model's files contain. Raises the errors of `details_of`."""
        async with self._describe_lock:
            if self._details is None:
                self._details = await asyncio.to_thread(self._describe)
            return self._details
