"""ResidentSet: the models of one server that have been requested, loaded or not, and the event of their changes."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Generic

from app.models.residency.resident import LoadedT, Policy, Resident, State

CLOSING = "The server is shutting down"
POLL_SECONDS = 0.25  # seconds between two checks whether the turn of a model has ended


class ResidentSet(Generic[LoadedT]):
    """Yields each model that has been requested at least once."""

    def __init__(self, policy: Callable[[str], Policy], clock: Callable[[], float]) -> None:
        """`policy` returns the policy of the model with a name. `clock` returns monotonic seconds."""
        self.clock = clock
        self.changed = asyncio.Event()  # set after each change of any model
        self.is_closed = False  # whether the server is shutting down
        self._policy = policy
        self._models: dict[str, Resident[LoadedT]] = {}

    def __iter__(self) -> Iterator[Resident[LoadedT]]:
        return iter(self._models.values())

    def of(self, name: str) -> Resident[LoadedT]:
        """Return the model with this name, loaded or not."""
        if name not in self._models:
            policy = self._policy(name)
            self._models[name] = Resident(name, policy.title, is_pinned=policy.is_pinned, keep_alive=policy.keep_alive)
        return self._models[name]

    def waiting(self) -> Iterator[Resident[LoadedT]]:
        """Yield the models whose load has not started, although requests need them."""
        return (model for model in self if model.is_wanted and model.state is State.WAITING)

    def titled(self, names: Sequence[str]) -> str:
        """Return the names of models for users, as a list."""
        return ", ".join(self.of(name).title for name in names)

    async def wait_for_change(self) -> None:
        """Wait until a model changes, at most POLL_SECONDS."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.changed.wait(), POLL_SECONDS)
