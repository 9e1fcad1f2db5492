"""The one model of a server, under its name and those that stand for it, and the check that a request means that one.

Knows no dialect: how models are listed is decided there.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from app.models.details import ModelDetails
from app.server.http.errors import InvalidRequest

ANY = "*"  # as what an alias stands for: the model that is served, whichever that is


class ServedModel:
    """The one model of a server, under its name and those that stand for it."""

    def __init__(
        self,
        name: str,
        context_length: int,
        vocab_size: int,
        aliases: Mapping[str, str],
        describe: Callable[[], ModelDetails] | None = None,
        *,
        also: Sequence[str] = (),
        loaded_as: str = "",
    ) -> None:
        """`also` are further names that are listed after `name`. `loaded_as` is the name that the model was loaded by,
        such as a path: requests may give it, and no list has it. `aliases` are other names and what each stands for: a
        model's name, or ANY. Those of other models are no names here. With a * in it, an alias stands for all names
        that begin and end so, and is not listed. `describe` takes a moment, and is called once, when it is needed."""
        self.name = name
        self.loaded_as = loaded_as or name
        self.context_length = context_length  # tokens of a prompt and its reply together
        self.vocab_size = vocab_size
        self.since = int(time.time())
        own = (name, *also, self.loaded_as)
        others = [alias for alias, meant in aliases.items() if meant in (*own, ANY)]
        listed = (name, *also, *(alias for alias in others if "*" not in alias))
        self.names: Sequence[str] = tuple(dict.fromkeys(listed))
        self._patterns = [alias for alias in others if "*" in alias]
        self._describing = asyncio.Lock()  # the first to ask waits; others do not take a thread each
        self._describe = describe or functools.partial(ModelDetails.unknown, self.loaded_as)
        self._details: ModelDetails | None = None

    def goes_by(self, name: str) -> bool:
        return self._is_served(name) or name == self.loaded_as

    def _is_served(self, name: str) -> bool:
        return name in self.names or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def named(self, asked: str | None) -> str:
        """The name that a reply to a request for `asked` carries: the same, unless it is empty or a path. Raises
        InvalidRequest for another model's name."""
        self.check(asked)
        return asked if asked and self._is_served(asked) else self.name

    def check(self, name: str | None) -> None:
        """Check that a request means this model, as one with no name or an empty one does.

        Raises InvalidRequest for the name of another model.
        """
        if name and not self.goes_by(name):
            message = f"The model {name!r} does not exist here"
            remedy = f"This server has {', '.join(map(repr, self.names))}."
            raise InvalidRequest(message, remedy, parameter="model", code="model_not_found", status=404)

    async def details(self) -> ModelDetails:
        """What its files say. Raises what `details_of` raises."""
        async with self._describing:
            if self._details is None:
                self._details = await asyncio.to_thread(self._describe)
            return self._details
