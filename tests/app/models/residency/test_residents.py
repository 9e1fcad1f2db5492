"""Residents: loads on demand, waiting requests, turns, and failures, with a machine that only counts bytes."""

import asyncio
import random
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.errors import ModelNotFound
from app.models.residency import resident, resident_set, residents, room, unloading
from app.models.residency.advice import Advice, Share
from app.models.residency.ledger import HOST, Bytes, Use
from app.models.residency.load_failures import FAILED_SECONDS, FULL_SECONDS
from app.models.residency.resident import (
    PATIENCE,
    DoesNotFit,
    LoadTask,
    ModelBusy,
    Needs,
    Policy,
    Reason,
    State,
    Suspended,
)
from app.models.residency.residents import MAX_RESTARTS, Residents
from app.models.residency.room import PATIENT_GAP
from app.models.residency.switch_advice import MANY_SWITCHES, SWITCH_WINDOW
from engine.errors import EngineError, LoadStopped, OutOfMemory
from engine.kv.parked_cache import ParkedCache
from engine.request import ServiceClass
from tests.app.server.live_server import Clock

BACKGROUND = ServiceClass.BACKGROUND


@dataclass
class Requests:
    """The suspended requests of a model."""

    of: str
    ended: list[str]  # takes the problem with which they end
    uses: Counter[ServiceClass]  # uses of the model

    @property
    def is_empty(self) -> bool:
        return not self.uses.total()

    def end(self, problem: str) -> None:
        self.ended.append(problem)


class Model:
    """A loaded model of a `Computer`."""

    needs_restart = False

    def __init__(self, computer: "Computer", name: str) -> None:
        self.name = name
        self.failure = ""
        self.is_running = False
        self._computer = computer

    async def start(self) -> None:
        """Do nothing."""

    def memories(self) -> Mapping[str, Bytes]:
        return {HOST: Bytes(weights=self._computer.sizes[self.name])}

    def can_suspend(self, uses: int) -> bool:
        return uses in self._computer.suspends

    async def suspend(self) -> tuple[Requests, ParkedCache | None]:
        await self._computer.on_unload()
        self._computer.loaded.remove(self.name)
        if self._computer.suspending_fails:
            raise RuntimeError("no memory")
        return Requests(self.name, self._computer.ended, self._computer.uses[self.name]), None

    def resume(self, suspended: Suspended) -> None:
        assert isinstance(suspended, Requests)
        assert suspended.of == self.name
        self._computer.resumed.append(self.name)

    async def close(self, *, parks: bool) -> ParkedCache | None:
        await self._computer.on_unload()
        if self.name not in self._computer.loaded:  # a suspension has failed
            return None
        self._computer.loaded.remove(self.name)
        size = self._computer.parked.get(self.name, 0)
        return cast(ParkedCache, SimpleNamespace(num_bytes=size)) if parks and size else None


class Computer:
    """A loader whose models have sizes in bytes. A test can hold loads back, and make them fail."""

    def __init__(self, memory: int, **sizes: int) -> None:
        self.memory = memory
        self.kept = 0  # bytes that unloaded models did not free
        self.foreign = 0  # bytes that other programs hold
        self.sizes = sizes
        self.loaded: list[str] = []
        self.loads: list[str] = []
        self.errors: dict[str, list[Exception]] = {}  # raised by the next loads of a model
        self.parked: dict[str, int] = {}  # bytes of the cache of each model that is parked when it is unloaded
        self.adopted: list[str] = []
        self.advised: list[tuple[str, str]] = []  # pairs of models for which advice was asked
        self.suspends: set[int] = set()  # numbers of requests that a model can suspend
        self.suspending_fails = False
        self.resumed: list[str] = []  # models whose suspended requests continued
        self.ended: list[str] = []  # the problems with which suspended requests ended
        self.uses: dict[str, Counter[ServiceClass]] = {}  # uses of the models whose requests can be suspended
        self.most = 0
        self.on_unload: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)  # called by each unload
        self._may_load = threading.Event()
        self._may_load.set()

    def hold(self) -> None:
        self._may_load.clear()

    def release(self) -> None:
        self._may_load.set()

    def needs(self, name: str) -> Needs:
        if name not in self.sizes:
            raise ModelNotFound(f"{name} is not on this machine")
        return Needs({HOST: self.sizes[name]})

    def remedy(self, name: str) -> str:
        return "Choose a smaller model."

    def together(self, names: tuple[str, str], available: Mapping[str, int]) -> Advice:
        self.advised.append(names)
        first, second = (self.sizes[name] for name in names)
        fits = first + second <= available[HOST]
        return Advice({HOST: Share((first, second), available[HOST])}, "" if fits else "Both fit with context = 5.")

    def available(self) -> Mapping[str, int]:
        return {HOST: self.memory - self.foreign - self.kept - sum(self.sizes[name] for name in self.loaded)}

    def capacity(self) -> Mapping[str, int]:
        return {HOST: self.memory}

    def process_memory(self) -> Mapping[str, int]:
        return {HOST: self.kept + sum(self.sizes[name] for name in self.loaded)}

    def load(self, name: str, allotted: Mapping[str, int], task: LoadTask, parked: ParkedCache | None) -> Model:
        assert allotted[HOST] >= self.sizes[name]
        self.loads.append(name)
        if parked is not None:
            self.adopted.append(name)
        while not self._may_load.wait(0.002):
            task.check()
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        self.loaded.append(name)
        self.most = max(self.most, sum(self.sizes[name] for name in self.loaded))
        return Model(self, name)


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (resident_set, residents):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.005)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def use(residents: Residents[Model], name: str, service: ServiceClass = ServiceClass.NORMAL) -> str:
    async with residents.use(name, service) as model:
        return model.name


def test_many_first_requests_cause_one_load() -> None:
    computer = Computer(100, a=50)

    async def ask() -> None:
        residents = Residents(computer)
        assert await asyncio.gather(*(use(residents, "a") for _ in range(50))) == ["a"] * 50
        assert (computer.loads, residents.of("a").loads) == (["a"], 1)
        assert residents.of("a").state is State.LOADED

    run(ask())


def test_least_recently_used_of_equal_models_makes_room(clock: Clock) -> None:
    computer = Computer(100, a=50, b=50, c=50)

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        for name in ("a", "b"):
            await use(residents, name)
            clock.seconds += 10
        await use(residents, "a")
        clock.seconds += 10
        await use(residents, "c")
        assert computer.loaded == ["a", "c"]
        assert residents.of("b").unloads.total() == 1

    run(ask())


def test_model_with_a_running_request_is_not_unloaded(clock: Clock) -> None:
    computer = Computer(100, a=60, b=60)

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        async with residents.use("a"):
            waiting = asyncio.create_task(use(residents, "b"))
            await until(lambda: residents.of("a").yields_at is not None)
            clock.seconds += 100
            await asyncio.sleep(0.05)
            assert (computer.loaded, waiting.done()) == (["a"], False)
        assert await waiting == "b"
        assert computer.loaded == ["b"]

    run(ask())


def test_requests_of_a_model_are_admitted_until_its_turn_ends(clock: Clock) -> None:
    computer = Computer(100, a=60, b=60)

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        async with residents.use("a"):
            waiting = asyncio.create_task(use(residents, "b"))
            await until(lambda: residents.of("a").yields_at is not None)
            assert await use(residents, "a") == "a"  # its turn has not ended
            clock.seconds += 100
            late = asyncio.create_task(use(residents, "a"))
            await asyncio.sleep(0.02)
            assert not late.done()
        assert await waiting == "b"
        clock.seconds += 100  # the turn of b ends as well
        assert await late == "a"
        assert computer.loads == ["a", "b", "a"]

    run(ask())


def test_background_requests_yield_at_once(clock: Clock) -> None:
    computer = Computer(100, a=60, b=60)

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        async with residents.use("a", BACKGROUND):
            waiting = asyncio.create_task(use(residents, "b"))
            await until(lambda: residents.of("a").yields_at is not None)
            assert not residents.of("a").admits(clock())
        assert await waiting == "b"

    run(ask())


@pytest.fixture
def suspending() -> Computer:
    """A computer on which one of two models fits, and one request of a model can be suspended."""
    computer = Computer(100, a=60, b=60)
    computer.suspends = {1}
    return computer


def suspending_residents(computer: Computer, clock: Clock) -> Residents[Model]:
    residents = Residents(computer, clock=clock)
    computer.uses["a"] = residents.of("a").uses
    return residents


async def hold(residents: Residents[Model], left: asyncio.Event) -> None:
    """Use model a in the background until the client has left."""
    async with residents.use("a", BACKGROUND):
        await left.wait()


def test_background_request_waits_until_an_urgent_one_has_ended(suspending: Computer, clock: Clock) -> None:
    async def ask() -> None:
        residents = suspending_residents(suspending, clock)
        async with residents.use("a", BACKGROUND):
            async with residents.use("b"):
                assert residents.of("a").state is State.WAITING
                assert residents.of("a").needs_server
                assert suspending.loads == ["a", "b"]
                assert not suspending.resumed
            clock.seconds += 100  # the turn of b ends
            await until(lambda: suspending.resumed == ["a"])
            assert residents.of("a").state is State.LOADED
        assert suspending.loads == ["a", "b", "a"]
        assert residents.of("a").unloads == {Reason.MEMORY: 1}

    run(ask())


@pytest.mark.parametrize("services", [[BACKGROUND, BACKGROUND], [BACKGROUND, ServiceClass.NORMAL]])
def test_model_with_other_requests_is_not_suspended(
    services: list[ServiceClass], suspending: Computer, clock: Clock
) -> None:
    """Neither beside a request of a user, nor if a request cannot be suspended."""

    async def ask() -> None:
        residents = suspending_residents(suspending, clock)
        async with residents.use("a", services[0]), residents.use("a", services[1]):
            waiting = asyncio.create_task(use(residents, "b"))
            await until(lambda: residents.of("a").yields_at is not None)
            await asyncio.sleep(0.02)
            assert suspending.loaded == ["a"]
        clock.seconds += 100
        assert await waiting == "b"
        assert not suspending.resumed

    run(ask())


def test_background_requests_do_not_suspend_each_other(suspending: Computer, clock: Clock) -> None:
    async def ask() -> None:
        residents = suspending_residents(suspending, clock)
        async with residents.use("a", BACKGROUND):
            waiting = asyncio.create_task(use(residents, "b", BACKGROUND))
            await until(lambda: residents.of("a").yields_at is not None)
            await asyncio.sleep(0.02)
            assert suspending.loaded == ["a"]
        assert await waiting == "b"

    run(ask())


def test_background_request_waits_for_a_pause_of_the_other_requests(clock: Clock) -> None:
    """While a user sends messages to one model, it is not unloaded between them, and not made to yield."""
    computer = Computer(100, a=60, b=60)

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        await use(residents, "b")
        waiting = asyncio.create_task(use(residents, "a", BACKGROUND))
        for _ in range(5):
            clock.seconds += PATIENT_GAP - 1
            await asyncio.sleep(0.02)
            assert await use(residents, "b") == "b"
        assert computer.loads == ["b"]
        clock.seconds += PATIENT_GAP
        assert await waiting == "a"

    run(ask())


def test_background_request_gets_its_turn_in_the_end(clock: Clock) -> None:
    computer = Computer(100, a=60, b=60)

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        async with residents.use("b"):
            waiting = asyncio.create_task(use(residents, "a", BACKGROUND))
            await asyncio.sleep(0.02)
            assert residents.of("b").yields_at is None
            clock.seconds += PATIENCE
            await until(lambda: residents.of("b").yields_at is not None)
        clock.seconds += 100
        assert await waiting == "a"

    run(ask())


def test_suspended_request_ends_if_its_model_cannot_be_loaded_again(suspending: Computer, clock: Clock) -> None:
    async def ask() -> None:
        residents = suspending_residents(suspending, clock)
        async with residents.use("a", BACKGROUND):
            suspending.errors["a"] = [ValueError("the file is gone")]
            await use(residents, "b")
            clock.seconds += 100
            await until(lambda: bool(suspending.ended))
            assert residents.of("a").state is State.FAILED
        assert suspending.ended == ["a could not be loaded"]
        assert residents.of("a").suspended is None

    run(ask())


def test_model_is_not_loaded_again_for_clients_that_have_left(suspending: Computer, clock: Clock) -> None:
    async def ask() -> None:
        residents = suspending_residents(suspending, clock)
        async with residents.use("b"), residents.use("b"):
            pass
        leaving = asyncio.Event()
        clock.seconds += 100
        client = asyncio.create_task(hold(residents, leaving))
        await until(lambda: suspending.loaded == ["a"])
        async with residents.use("b"):
            leaving.set()
            await client
            await until(lambda: residents.of("a").state is State.UNLOADED)
            assert not residents.of("a").needs_server
        clock.seconds += 100
        await asyncio.sleep(0.02)
        assert suspending.loaded == ["b"]

    run(ask())


def test_requests_that_cannot_be_suspended_after_all_have_ended(suspending: Computer, clock: Clock) -> None:
    async def ask() -> None:
        residents = suspending_residents(suspending, clock)
        suspending.suspending_fails = True
        async with residents.use("a", BACKGROUND):
            assert await use(residents, "b") == "b"
            assert residents.of("a").state is State.UNLOADED

    run(ask())


def test_urgent_request_does_not_wait_for_a_background_load_that_waits_for_memory(clock: Clock) -> None:
    computer = Computer(100, a=60, b=60, c=30)

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        async with residents.use("b"):
            waiting = asyncio.create_task(use(residents, "a", BACKGROUND))
            await until(lambda: residents.of("a").task is not None)
            assert await use(residents, "c") == "c"
            assert not waiting.done()
        clock.seconds += 100
        assert await waiting == "a"

    run(ask())


def test_suspended_requests_end_when_the_server_ends(suspending: Computer, clock: Clock) -> None:
    async def ask() -> None:
        residents = suspending_residents(suspending, clock)
        async with residents.use("a", BACKGROUND), residents.use("b"):
            await residents.close()
            assert suspending.ended == ["The server is shutting down"]

    run(ask())


def test_model_that_was_unloaded_for_another_one_does_not_stop_its_load(clock: Clock) -> None:
    """An urgent request for the unloaded model arrives during its unload."""
    computer = Computer(100, a=60, b=60)

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        await use(residents, "b")
        clock.seconds += 100
        late: list[asyncio.Task[str]] = []

        async def arrive() -> None:
            computer.on_unload = partial(asyncio.sleep, 0)
            late.append(asyncio.create_task(use(residents, "b", ServiceClass.INTERACTIVE)))
            await asyncio.sleep(0.01)

        computer.on_unload = arrive
        assert await use(residents, "a") == "a"
        assert computer.loads == ["b", "a"]
        clock.seconds += 100
        assert await late[0] == "b"

    run(ask())


def test_requests_that_end_while_they_are_suspended_cause_no_load(suspending: Computer, clock: Clock) -> None:
    async def ask() -> None:
        residents = suspending_residents(suspending, clock)
        ends = asyncio.Event()
        client = asyncio.create_task(hold(residents, ends))
        await until(lambda: suspending.loaded == ["a"])

        async def leave() -> None:
            ends.set()
            await client

        suspending.on_unload = leave
        async with residents.use("b"):
            assert residents.of("a").suspended is None
            assert residents.of("a").state is State.UNLOADED

    run(ask())


def test_requests_that_are_suspended_while_the_server_ends_get_an_end(suspending: Computer, clock: Clock) -> None:
    async def ask() -> None:
        residents = suspending_residents(suspending, clock)
        closing: list[asyncio.Task[None]] = []

        async def close() -> None:
            suspending.on_unload = partial(asyncio.sleep, 0)
            closing.append(asyncio.create_task(residents.close()))
            await asyncio.sleep(0.01)

        suspending.on_unload = close
        async with residents.use("a", BACKGROUND):
            with pytest.raises(EngineError, match="shutting down"):
                await use(residents, "b")
            await closing[0]
            assert suspending.ended == ["The server is shutting down"]

    run(ask())


def test_background_load_that_waits_for_a_pause_lets_another_one_go_first(clock: Clock) -> None:
    computer = Computer(100, a=60, b=60, c=30)

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        async with residents.use("b"):
            waiting = asyncio.create_task(use(residents, "a", BACKGROUND))
            await until(lambda: residents.of("a").task is not None)
            assert await use(residents, "c", BACKGROUND) == "c"
            assert not waiting.done()
        clock.seconds += 100
        assert await waiting == "a"

    run(ask())


def test_background_request_that_has_waited_long_gets_a_turn(suspending: Computer, clock: Clock) -> None:
    """After the load, it is not suspended at once for the requests of the model that had to yield."""

    async def ask() -> None:
        residents = suspending_residents(suspending, clock)
        async with residents.use("b"):
            waiting = asyncio.create_task(hold(residents, asyncio.Event()))
            await until(lambda: residents.of("a").task is not None)
            clock.seconds += PATIENCE
            await until(lambda: residents.of("b").yields_at is not None)
        clock.seconds += 100
        await until(lambda: suspending.loaded == ["a"])
        late = asyncio.create_task(use(residents, "b"))
        await asyncio.sleep(0.05)
        assert suspending.loaded == ["a"]
        clock.seconds += resident.LONGEST_TURN
        assert await late == "b"
        waiting.cancel()

    run(ask())


def test_urgent_requests_load_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PATIENT_GAP", 0.0)
    computer = Computer(100, a=100, b=100, c=100)

    async def ask() -> None:
        residents = Residents(computer)
        computer.hold()
        first = asyncio.create_task(use(residents, "a"))
        await until(lambda: computer.loads == ["a"])
        others = [
            asyncio.create_task(use(residents, "b", BACKGROUND)),
            asyncio.create_task(use(residents, "c", ServiceClass.INTERACTIVE)),
        ]
        await asyncio.sleep(0.02)
        computer.release()
        await asyncio.gather(first, *others)
        assert computer.loads == ["a", "c", "b"]

    run(ask())


def test_load_stops_when_its_last_request_leaves() -> None:
    computer = Computer(100, a=50)

    async def ask() -> None:
        residents = Residents(computer)
        computer.hold()
        waiting = [asyncio.create_task(use(residents, "a")) for _ in range(2)]
        await until(lambda: computer.loads == ["a"])
        waiting[0].cancel()
        await asyncio.sleep(0.02)
        assert residents.of("a").state is State.LOADING
        waiting[1].cancel()
        await until(lambda: residents.of("a").state is State.UNLOADED)
        computer.release()
        assert await use(residents, "a") == "a"
        assert computer.loads == ["a", "a"]

    run(ask())


def test_load_continues_without_requests_once_half_of_it_is_done() -> None:
    computer = Computer(100, a=50)

    async def ask() -> None:
        residents = Residents(computer)
        computer.hold()
        waiting = asyncio.create_task(use(residents, "a"))
        await until(lambda: computer.loads == ["a"])
        task = residents.of("a").task
        assert task is not None
        task.done, task.total = 6, 10
        waiting.cancel()
        await asyncio.sleep(0.02)
        computer.release()
        await until(lambda: residents.of("a").state is State.LOADED)

    run(ask())


def test_request_that_does_not_wait_learns_when_to_try_again() -> None:
    computer = Computer(100, a=50)

    async def ask() -> None:
        residents = Residents(computer)
        computer.hold()
        with pytest.raises(ModelBusy) as busy:
            async with residents.use("a", waits=False):
                raise AssertionError
        assert busy.value.seconds >= 1
        computer.release()
        await until(lambda: residents.of("a").state is State.LOADED)
        assert residents.of("a").uses.total() == 0
        async with residents.use("a", waits=False) as model:
            assert model.name == "a"

    run(ask())


def test_request_that_does_not_wait_gets_the_name_of_the_holder() -> None:
    computer = Computer(100, a=50, holder=80)

    async def ask() -> None:
        residents = Residents(computer, lambda name: Policy(name, is_pinned=name == "holder"))
        await use(residents, "holder")
        waiting = asyncio.create_task(use(residents, "a"))
        await until(lambda: (task := residents.of("a").task) is not None and bool(task.stage))
        with pytest.raises(ModelBusy, match="a is waiting: waiting for the memory of holder"):
            async with residents.use("a", waits=False):
                raise AssertionError
        waiting.cancel()
        await residents.close()

    run(ask())


def test_model_that_is_too_large_alone_unloads_nothing() -> None:
    computer = Computer(100, a=50, huge=101)

    async def ask() -> None:
        residents = Residents(computer)
        await use(residents, "a")
        with pytest.raises(DoesNotFit, match="huge needs 101 B of memory, and all models may use 100 B"):
            await use(residents, "huge")
        assert computer.loaded == ["a"]

    run(ask())


def test_failed_model_is_not_tried_again_for_a_while(clock: Clock) -> None:
    computer = Computer(100, a=50)
    computer.errors["a"] = [ValueError("damaged")]

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        found = await asyncio.gather(*(use(residents, "a") for _ in range(3)), return_exceptions=True)
        assert [str(one) for one in found] == ["a could not be loaded"] * 3
        with pytest.raises(EngineError, match="could not be loaded"):
            await use(residents, "a")
        assert (computer.loads, residents.of("a").failed_loads) == (["a"], 1)
        clock.seconds += FAILED_SECONDS + 1
        assert await use(residents, "a") == "a"

    run(ask())


def test_memory_that_another_program_took_causes_one_retry() -> None:
    computer = Computer(100, a=50)
    computer.errors["a"] = [OutOfMemory("no memory")]

    async def ask() -> None:
        residents = Residents(computer)
        assert await use(residents, "a") == "a"
        computer.errors["a"] = [OutOfMemory("no memory"), OutOfMemory("no memory")]
        await residents.unload("a")
        with pytest.raises(OutOfMemory):
            await use(residents, "a")
        assert (computer.loads, computer.loaded) == (["a"] * 4, [])

    run(ask())


def test_model_that_no_longer_fits_at_the_retry_is_tried_again_later(clock: Clock) -> None:
    """Another program takes memory during the load. Models that are in use stay."""

    class Shared(Computer):
        def load(self, name: str, allotted: Mapping[str, int], task: LoadTask, parked: ParkedCache | None) -> Model:
            if name == "a" and not self.foreign:
                self.foreign = 60
                raise OutOfMemory("no memory")
            return super().load(name, allotted, task, parked)

    computer = Shared(100, a=50, used=10)
    taken = r"a needs 50 B of memory, and 40 B of 100 B are available \(host\)"

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        async with residents.use("used"):
            with pytest.raises(OutOfMemory, match=taken) as raised:
                await use(residents, "a")
            assert raised.value.remedy == "Close other programs. Choose a smaller model."
            assert residents.retry_seconds(residents.of("a")) == FULL_SECONDS
            computer.foreign = 1
            clock.seconds += FULL_SECONDS
            assert await use(residents, "a") == "a"
            assert computer.loaded == ["used", "a"]

    run(ask())


def test_model_that_does_not_fit_beside_other_programs_unloads_nothing() -> None:
    computer = Computer(100, idle=10, a=50)
    computer.foreign = 60

    async def ask() -> None:
        residents = Residents(computer)
        await use(residents, "idle")
        with pytest.raises(OutOfMemory, match="40 B of 100 B are available"):
            await use(residents, "a")
        assert (computer.loaded, computer.loads) == (["idle"], ["idle"])
        limited = Residents(computer, limits={HOST: 49})
        with pytest.raises(DoesNotFit, match="and all models may use 30 B"):
            await use(limited, "a")

    run(ask())


def test_failed_allocation_drops_parked_caches_and_unloads_idle_models(clock: Clock) -> None:
    """Models that are used or pinned stay, and their requests notice nothing."""
    computer = Computer(1000, idle=10, used=10, pinned=10, parked=10, a=50)
    computer.parked = {"parked": 5}
    computer.errors["a"] = [OutOfMemory("no memory")]

    async def ask() -> None:
        residents = Residents(computer, lambda name: Policy(name, is_pinned=name == "pinned"), clock=clock)
        for name in ("idle", "used", "pinned", "parked"):
            await use(residents, name)
        residents.of("parked").keep_alive = 0
        await use(residents, "parked")
        await until(lambda: residents.of("parked").parked is not None)
        clock.seconds += 100
        async with residents.use("used"):
            assert await use(residents, "a") == "a"
            assert computer.loaded == ["used", "pinned", "a"]
        assert residents.of("parked").parked is None

    run(ask())


def test_error_of_a_failed_load_frees_what_the_load_has_allocated() -> None:
    class Weights:
        pass

    made: list[weakref.ref[Weights]] = []

    class Careless(Computer):
        def load(self, name: str, allotted: Mapping[str, int], task: LoadTask, parked: ParkedCache | None) -> Model:
            weights = Weights()
            made.append(weakref.ref(weights))
            raise OutOfMemory("no memory")

    async def ask() -> None:
        residents = Residents(Careless(100, a=50))
        with pytest.raises(OutOfMemory, match=r"a ran out of memory, although it needs 50 B of 100 B \(host\)"):
            await use(residents, "a")
        assert residents.of("a").problem is not None
        assert [weights() for weights in made] == [None, None]

    run(ask())


def test_model_that_is_not_closed_cleanly_is_unloaded_for_another_one(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Model):
        async def close(self, *, parks: bool) -> ParkedCache | None:
            await super().close(parks=parks)
            raise ValueError("not closed")

    class Makes(Computer):
        def load(self, name: str, allotted: Mapping[str, int], task: LoadTask, parked: ParkedCache | None) -> Model:
            super().load(name, allotted, task, parked)
            return Broken(self, name)

    computer = Makes(100, a=60, b=60)

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        await use(residents, "a")
        clock.seconds += 100
        assert await use(residents, "b") == "b"
        assert (computer.loaded, residents.of("a").state) == (["b"], State.UNLOADED)
        await residents.close()

    run(ask())
    assert [record.message for record in caplog.records] == [f"{name} was not closed cleanly" for name in "ab"]


def test_memory_is_trimmed_when_nothing_of_an_unloaded_model_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Model]] = []
    left: list[Model | None] = []

    class Remembers(Computer):
        def load(self, name: str, allotted: Mapping[str, int], task: LoadTask, parked: ParkedCache | None) -> Model:
            model = super().load(name, allotted, task, parked)
            made.append(weakref.ref(model))
            return model

    async def ask() -> None:
        residents = Residents(Remembers(100, a=50))
        await use(residents, "a")
        await residents.unload("a")

    monkeypatch.setattr(unloading, "trim", lambda: left.extend(model() for model in made))
    run(ask())
    assert left == [None]


def test_model_that_does_not_fit_beside_its_own_parked_cache_drops_it(clock: Clock) -> None:
    computer = Computer(10_000, a=450)
    computer.parked = {"a": 100}

    async def ask() -> None:
        residents = Residents(computer, limits={HOST: 500}, clock=clock)
        residents.of("a").keep_alive = 0
        await use(residents, "a")
        await until(lambda: residents.of("a").parked is not None)
        assert await use(residents, "a") == "a"

    run(ask())


def test_no_load_is_planned_on_memory_that_an_unload_did_not_free(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """All models may use 500 MB. The first one frees 150 MB less than it took, and these bytes later."""

    class Keeps(Model):
        async def close(self, *, parks: bool) -> ParkedCache | None:
            computer.kept = 150_000_000
            return await super().close(parks=parks)

    class Makes(Computer):
        def load(self, name: str, allotted: Mapping[str, int], task: LoadTask, parked: ParkedCache | None) -> Model:
            made = super().load(name, allotted, task, parked)
            return Keeps(self, name) if name == "a" else made

    computer = Makes(10**9, a=300_000_000, b=450_000_000, c=350_000_000)

    async def ask() -> None:
        residents = Residents(computer, limits={HOST: 500_000_000}, clock=clock)
        await use(residents, "a")
        await residents.unload("a")
        assert "a was unloaded, but did not free 150.0 MB (host)" in caplog.text
        ledger = await residents.memory.measured_ledger()
        assert (ledger.unfreed[HOST], ledger.free(HOST)) == (150_000_000, 350_000_000)
        with pytest.raises(OutOfMemory, match=r"b needs 450.0 MB of memory.* 350.0 MB of 500.0 MB"):
            await use(residents, "b")
        assert await use(residents, "c") == "c"
        clock.seconds += 100
        computer.kept = 0
        assert await use(residents, "b") == "b"
        assert computer.most == 450_000_000

    run(ask())


def test_missing_model_raises_its_error() -> None:
    async def ask() -> None:
        with pytest.raises(ModelNotFound):
            await use(Residents(Computer(100)), "none")

    run(ask())


def test_failed_engine_is_loaded_again_a_few_times(clock: Clock) -> None:
    computer = Computer(100, a=50)

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        for _ in range(MAX_RESTARTS + 1):
            await use(residents, "a")
            loaded = residents.of("a").loaded
            assert loaded is not None
            loaded.failure = "a bug"
        with pytest.raises(EngineError, match="keeps failing"):
            await use(residents, "a")
        await until(lambda: not computer.loaded)
        assert computer.loads == ["a"] * (MAX_RESTARTS + 1)

    run(ask())


def test_failed_engine_returns_its_memory_when_its_request_ends() -> None:
    computer = Computer(100, a=50)

    async def ask() -> None:
        residents = Residents(computer)
        async with residents.use("a") as model:
            model.failure = "a bug"
        await until(lambda: not computer.loaded)
        assert residents.of("a").state is State.UNLOADED
        assert await use(residents, "a") == "a"

    run(ask())


def test_unused_model_is_unloaded_after_its_keep_alive(clock: Clock) -> None:
    computer = Computer(100, a=50)

    async def ask() -> None:
        residents = Residents(computer, lambda name: Policy(name, keep_alive=30), clock=clock)
        await use(residents, "a")
        assert residents.seconds_left(residents.of("a")) == 30
        clock.seconds += 31
        with suppress(ModelNotFound):
            await use(residents, "none")  # any event makes the residents look at the clock
        await until(lambda: residents.of("a").unloads.total() == 1)
        assert not computer.loaded

    run(ask())


def test_pinned_model_is_neither_unloaded_nor_expired(clock: Clock) -> None:
    computer = Computer(100, a=60, b=60, c=40)

    async def ask() -> None:
        residents = Residents(computer, lambda name: Policy(name, keep_alive=1), clock=clock)
        await residents.load("a", pinned=True)
        clock.seconds += 100
        waiting = asyncio.create_task(use(residents, "b"))
        await asyncio.sleep(0.05)
        assert (computer.loaded, waiting.done()) == (["a"], False)
        await residents.unload("a")
        assert await waiting == "b"

    run(ask())


def test_cache_of_an_unloaded_model_is_used_by_its_next_load(clock: Clock) -> None:
    computer = Computer(100, a=40, b=70)
    computer.parked = {"a": 10, "b": 10}

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        for name in ("a", "b", "a"):
            await use(residents, name)
            clock.seconds += 100
        assert computer.adopted == ["a"]
        assert residents.of("b").parked is not None
        assert [entry.use for entry in (await residents.memory.measured_ledger()).entries] == [Use.IDLE, Use.PARKED]

    run(ask())


def test_parked_cache_is_dropped_before_a_model_is_unloaded(clock: Clock) -> None:
    computer = Computer(100, a=40, b=70, c=25)
    computer.parked = {"a": 20}

    async def ask() -> None:
        residents = Residents(computer, limits={HOST: 100}, clock=clock)
        for name in ("a", "b", "c"):
            await use(residents, name)
            clock.seconds += 100
        assert (computer.loaded, residents.of("a").parked) == (["b", "c"], None)

    run(ask())


def test_unload_on_request_keeps_no_cache() -> None:
    computer = Computer(100, a=40)
    computer.parked = {"a": 20}

    async def ask() -> None:
        residents = Residents(computer)
        await use(residents, "a")
        await residents.unload("a")
        assert residents.of("a").parked is None

    run(ask())


def test_unload_waits_for_running_requests() -> None:
    computer = Computer(100, a=50)

    async def ask() -> None:
        residents = Residents(computer)
        assert not await residents.unload("a")
        async with residents.use("a"):
            unloading = asyncio.create_task(residents.unload("a"))
            await asyncio.sleep(0.02)
            assert not unloading.done()
        assert await unloading
        assert not computer.loaded

    run(ask())


def test_close_ends_waiting_requests_and_unloads_all() -> None:
    computer = Computer(100, a=40, b=40)

    async def ask() -> None:
        residents = Residents(computer)
        await use(residents, "a")
        computer.hold()
        waiting = asyncio.create_task(use(residents, "b"))
        await until(lambda: computer.loads == ["a", "b"])
        await residents.close()
        with pytest.raises(EngineError, match="shutting down"):
            await waiting
        assert not computer.loaded
        with pytest.raises(EngineError, match="shutting down"):
            await use(residents, "a")

    run(ask())


@pytest.mark.parametrize("seed", range(6))
def test_random_clients_all_get_their_models_and_never_too_much_memory(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight clients use five models, of which any two fit, and some clients leave while they wait."""
    monkeypatch.setattr(resident, "SHORTEST_TURN", 0.01)
    monkeypatch.setattr(room, "PATIENT_GAP", 0.01)
    monkeypatch.setattr(resident, "PATIENCE", 0.05)
    computer, draw = Computer(100, a=30, b=40, c=50, d=45, e=20), random.Random(seed)
    computer.suspends = {1, 3}

    async def use_briefly(residents: Residents[Model], name: str, service: ServiceClass) -> str:
        async with residents.use(name, service) as model:
            await asyncio.sleep(draw.random() * (0.1 if service is BACKGROUND else 0.01))
            return model.name

    async def client(residents: Residents[Model]) -> None:
        for _ in range(12):
            name, service = draw.choice("abcde"), draw.choice(list(ServiceClass))
            asking = asyncio.create_task(use_briefly(residents, name, service))
            if draw.random() < 0.2:
                await asyncio.sleep(draw.random() * 0.01)
                asking.cancel()
            with suppress(asyncio.CancelledError):
                assert await asking == name
            await asyncio.sleep(draw.random() * 0.005)

    async def ask() -> None:
        residents = Residents(computer)
        computer.uses = {name: residents.of(name).uses for name in "abcde"}
        await asyncio.gather(*(client(residents) for _ in range(8)))
        assert all(model.uses.total() == 0 and not model.is_wanted for model in residents)
        assert computer.most <= computer.memory
        await residents.close()
        assert not computer.loaded

    run(ask())


def test_stopped_load_is_no_failure() -> None:
    assert issubclass(LoadStopped, Exception)
    with pytest.raises(LoadStopped):
        LoadTask(is_stopped=True).check()


@pytest.mark.parametrize("asks", [False, True])
def test_model_is_unloaded_when_the_request_of_a_disconnected_client_has_ended(asks: bool) -> None:
    computer = Computer(100, a=50)

    async def ask() -> None:
        residents = Residents(computer)
        async with residents.use("a") as model:
            model.is_running = True
            residents.of("a").keep_alive = None if asks else 0
        unloading = asyncio.create_task(residents.unload("a")) if asks else None
        await asyncio.sleep(0.02)
        assert computer.loaded == ["a"]
        model.is_running = False
        await until(lambda: computer.loaded == [])
        assert unloading is None or await unloading

    run(ask())


def test_models_that_replace_each_other_cause_advice_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    computer = Computer(100, a=60, b=60)

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        for count in range(4 * MANY_SWITCHES):
            await use(residents, "ab"[count % 2])
            clock.seconds += 50
        await until(lambda: bool(residents.advice.given))
        assert len(computer.advised) == 1
        [(titles, advice)] = residents.advice.given.items()
        assert (set(titles), advice.remedy) == ({"a", "b"}, "Both fit with context = 5.")
        assert advice.shares[HOST] == Share((60, 60), 100)

    run(ask())
    [line] = [record.message for record in caplog.records if "do not fit together" in record.message]
    assert line.endswith("do not fit together: host 60 B and 60 B of 100 B. Both fit with context = 5.")


def test_rare_switches_cause_no_advice(clock: Clock) -> None:
    computer = Computer(100, a=60, b=60)

    async def ask() -> None:
        residents = Residents(computer, clock=clock)
        for count in range(4 * MANY_SWITCHES):
            await use(residents, "ab"[count % 2])
            clock.seconds += SWITCH_WINDOW
        assert computer.advised == []

    run(ask())


def test_advice_names_other_models_and_those_that_are_pinned(clock: Clock) -> None:
    computer = Computer(100, a=30, b=40, pinned=60)

    async def ask() -> None:
        residents = Residents(computer, lambda name: Policy(name, is_pinned=name == "pinned"), clock=clock)
        await use(residents, "pinned")
        for count in range(MANY_SWITCHES + 1):
            await use(residents, "ab"[count % 2])
            clock.seconds += 50
        await until(lambda: bool(residents.advice.given))
        [advice] = residents.advice.given.values()
        assert advice.remedy == "Both fit without pinned: ingle unload."
        computer.sizes["c"] = 80
        waiting = asyncio.create_task(use(residents, "c"))
        await until(lambda: ("pinned", "c") in residents.advice.given)
        assert residents.advice.given["pinned", "c"].remedy == "Both fit with context = 5."
        waiting.cancel()
        await residents.close()

    run(ask())
