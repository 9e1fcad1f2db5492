"""The names of models in requests: those of the command line, their aliases, and the names of all stored models.

Names that look like paths or addresses are never looked up: a client must not learn what files exist.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from app.server.http.errors import InvalidRequest

ANY_MODEL = "*"  # target of an alias that refers to the default model, whichever it is
LATEST = ":latest"  # clients of Ollama append it to a name without a tag
LISTED = 8  # names in an error message
# The text that precedes all model names in the current request and in its reply: the caller is another machine, which
# knows this one by that name. Empty: the caller uses the plain names.
PREFIX: ContextVar[str] = ContextVar("PREFIX", default="")


@dataclass(frozen=True, slots=True)
class GivenModel:
    """A model with names that the user has chosen. `key` is the name by which it is loaded, such as a path."""

    key: str
    names: tuple[str, ...]  # the first is used in replies

    def has(self, name: str) -> bool:
        return name in self.names or name == self.key


@dataclass(frozen=True, slots=True)
class FoundModel:
    """The model that a request names."""

    key: str
    reply_name: str  # the model name in the reply


class ModelNames:
    """The names that requests may use."""

    def __init__(
        self,
        given: Sequence[GivenModel],
        aliases: Mapping[str, str] | None = None,
        known: Callable[[str], str | None] = lambda name: None,
        stored: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Set the names.

        `given` are the models of the command line; the first is the default model. `aliases` maps further names to the
        name of a model, or to ANY_MODEL; one with a * matches names by pattern. `known` returns the full name of a
        stored model, or None. `stored` returns the names of all stored models. Both read folders.
        """
        self._given = given
        self._aliases = dict(aliases or {})
        self._known = known
        self._stored = stored

    @property
    def default(self) -> GivenModel:
        return self._given[0]

    async def find(self, name: str | None) -> FoundModel:
        """Return the model with a name; without a name, the default model.

        Raises InvalidRequest if there is none on this machine.
        """
        found = await self._find(name and name.removeprefix(PREFIX.get()))
        return replace(found, reply_name=f"{PREFIX.get()}{found.reply_name}")

    async def _find(self, name: str | None) -> FoundModel:
        if not name:
            return FoundModel(self.default.key, self.default.names[0])
        if (found := self._given_by(name)) is not None:
            return found
        target = self._target(name)
        if target == ANY_MODEL:
            return FoundModel(self.default.key, name)
        if target is not None and (found := self._given_by(target)) is not None:
            return FoundModel(found.key, name)
        if (key := await asyncio.to_thread(self._known, target or name)) is not None:
            return FoundModel(key, name)
        if name.endswith(LATEST):
            return await self._find(name.removesuffix(LATEST))
        raise self._unknown(name)

    def _given_by(self, name: str) -> FoundModel | None:
        """Return the given model with a name. A reply to a request by its key has its first name."""
        model = next((model for model in self._given if model.has(name)), None)
        if model is None:
            return None
        return FoundModel(model.key, name if name in model.names else model.names[0])

    def _target(self, name: str) -> str | None:
        """Return the name for which `name` is an alias, or None."""
        if name in self._aliases and "*" not in name:
            return self._aliases[name]
        return next(
            (meant for alias, meant in self._aliases.items() if "*" in alias and fnmatchcase(name, alias)), None
        )

    def _unknown(self, name: str) -> InvalidRequest:
        names = [f"{PREFIX.get()}{given}" for given in self.given_names[:LISTED]]
        remedy = f"This server has {', '.join(map(repr, names))}."
        message = f"The model {PREFIX.get() + name!r} does not exist here"
        return InvalidRequest(message, remedy, parameter="model", code="model_not_found", status=404)

    def _listed_given(self) -> dict[str, list[str]]:
        listed = {model.key: list(model.names) for model in self._given}
        for alias, target in self._aliases.items():
            found = FoundModel(self.default.key, alias) if target == ANY_MODEL else self._given_by(target)
            if "*" not in alias and found is not None and alias not in listed[found.key]:
                listed[found.key].append(alias)
        return listed

    @property
    def given_names(self) -> Sequence[str]:
        """All names of the models of the command line, with the aliases."""
        return [name for names in self._listed_given().values() for name in names]

    async def listed(self) -> Mapping[str, Sequence[str]]:
        """Return the names of each model, keyed by the name by which it is loaded. The default model is first."""
        listed = self._listed_given()
        for name in await asyncio.to_thread(self._stored):
            if "://" in name:
                continue  # a model from the web: requests cannot name it, and addresses are private
            aliases = [alias for alias, target in self._aliases.items() if target == name and "*" not in alias]
            listed.setdefault(name, [name, *aliases])
        return {key: [f"{PREFIX.get()}{name}" for name in names] for key, names in listed.items()}
