"""SwitchAdvice: finds out what would let two models fit together that are unloaded for each other again and again."""

import asyncio
import logging
from collections import deque
from dataclasses import replace
from typing import Generic

from app.models.residency.advice import Advice
from app.models.residency.memory import ResidentMemory
from app.models.residency.resident import LoadedT, Loader, Resident
from app.models.residency.resident_set import ResidentSet
from quant.errors import InglenookError

log = logging.getLogger(__name__)

MANY_SWITCHES, SWITCH_WINDOW = 3, 300.0  # number of switches between two models in these seconds that causes advice


class SwitchAdvice(Generic[LoadedT]):
    """The advice for the models of one server, at most one for each pair."""

    def __init__(self, loader: Loader[LoadedT], memory: ResidentMemory[LoadedT], models: ResidentSet[LoadedT]) -> None:
        self.given: dict[tuple[str, str], Advice] = {}  # keyed by the titles of two models
        self._loader = loader
        self._memory = memory
        self._models = models
        self._switches: dict[frozenset[str], deque[float]] = {}  # times of switches in seconds, keyed by two names
        self._asked: set[frozenset[str]] = set()
        self._asking: set[asyncio.Task[None]] = set()

    def note_switch(self, unloaded: str, loaded: str, now: float) -> None:
        """Count a switch between two models, and ask for advice if there have been many within a short time."""
        times = self._switches.setdefault(frozenset((unloaded, loaded)), deque(maxlen=MANY_SWITCHES))
        times.append(now)
        if len(times) == MANY_SWITCHES and now - times[0] <= SWITCH_WINDOW:
            self.ask(unloaded, loaded)

    def ask(self, one: str, other: str) -> None:
        """Find out in the background what would let two models fit together, unless that has been asked before."""
        pair = frozenset((one, other))
        if pair not in self._asked:
            self._asked.add(pair)
            task = asyncio.create_task(self._advise(self._models.of(one), self._models.of(other)))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    def close(self) -> None:
        """Stop asking."""
        for task in self._asking:
            task.cancel()

    async def _advise(self, one: Resident[LoadedT], other: Resident[LoadedT]) -> None:
        ledger = await self._memory.measured_ledger()
        everyone = [entry.name for entry in ledger.entries]
        available = {memory: ledger.free(memory, everyone) for memory in ledger.available}
        try:
            advice = await asyncio.to_thread(self._loader.together, (one.name, other.name), available)
        except (InglenookError, OSError):  # its load reports the error
            return
        others = [it for it in self._models if it.loaded and it is not one and it is not other]
        if not advice.remedy and not others:
            return
        titles = ", ".join(model.title for model in others)
        advice = advice if advice.remedy else replace(advice, remedy=f"Both fit without {titles}: ingle unload.")
        self.given[one.title, other.title] = advice
        log.warning("%s and %s do not fit together: %s. %s", one.title, other.title, advice.numbers, advice.remedy)
