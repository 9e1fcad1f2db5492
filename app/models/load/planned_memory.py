"""Planned memory: what a load takes of each memory, and with which settings two models would fit together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from app.models.residency.advice import Advice, Share
from app.models.residency.ledger import HOST
from engine.fit import MemoryPlan

# Bytes of a tokenizer per token. Measured: 260 to 340 with large vocabularies, and 420 with one of 32,000 tokens.
_TOKEN_BYTES = 330


def memory_name(gpu: int | None) -> str:
    """Return the name of the memory of a GPU, or that of the machine."""
    return HOST if gpu is None else f"cuda:{gpu}"


def least_bytes(plan: MemoryPlan) -> Mapping[str, int]:
    """Return the bytes of each memory that a load needs at least."""
    if plan.gpu is None:
        return {HOST: plan.least + tokenizer_bytes(plan.vocab_size)}
    return {memory_name(plan.gpu): plan.least, HOST: plan.host_weights + tokenizer_bytes(plan.vocab_size)}


def tokenizer_bytes(vocab_size: int) -> int:
    """Return the bytes that a tokenizer takes of the machine's memory."""
    return _TOKEN_BYTES * vocab_size


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The memory of one model with its settings, and with a context of useful length unless they have another one."""

    plan: MemoryPlan
    useful: MemoryPlan

    @property
    def memory(self) -> str:
        """Name of the memory in which the model computes."""
        return memory_name(self.plan.gpu)

    @property
    def _beside(self) -> int:
        """Bytes of its memory that the model takes beside its engine."""
        return tokenizer_bytes(self.plan.vocab_size) if self.memory == HOST else 0

    def of_engine(self, free: int) -> int:
        """Return the bytes of its memory that the engine takes if the model may use `free` bytes.

        Caches take half of the memory at most, so that other models fit, unless a useful context needs more.
        """
        free -= self._beside
        wanted = max(self.useful.least, self.plan.weights + self.plan.steps + self.plan.draft + free // 2)
        return min(free, wanted, self.plan.most)

    def all_taken(self, available: Mapping[str, int]) -> Mapping[str, int]:
        """Return the bytes of each memory that the model takes if no other model is loaded."""
        taken = self.of_engine(available.get(self.memory, 0)) + self._beside
        return {**least_bytes(self.useful), self.memory: taken}


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings with which two models may fit together, and the plan of each of them."""

    context: int
    kv_type: str  # empty: that of the settings
    plans: tuple[LoadPlan, LoadPlan]

    @property
    def is_on_cpu(self) -> bool:
        return all(plan.memory == HOST for plan in self.plans)

    def __str__(self) -> str:
        kv_type = f" and kv_type = {self.kv_type}" if self.kv_type else ""
        return f"context = {self.context}{kv_type}"


def advice_on(plans: tuple[LoadPlan, LoadPlan], variants: Sequence[Variant], available: Mapping[str, int]) -> Advice:
    """Return what lets two models with these plans fit into the `available` bytes of each memory.

    `variants` start with the longest context. The first ones that fit are advised: one without another type of keys and
    values, and one with it if its context is longer.
    """
    first, second = plans
    if _fits_after(first, second, available):
        first, second = second, first
    shares = _shares(first.all_taken(available), least_bytes(second.useful), available)
    if plans[0] is not first:
        shares = {memory: Share(share.needed[::-1], share.available) for memory, share in shares.items()}
    if _fits_after(first, second, available):
        return Advice(shares, "")
    fitting = [variant for variant in _without_equals(variants) if _fit_together(variant.plans, available)]
    return Advice(shares, _remedy(fitting, variants[-1], available))


def _without_equals(variants: Sequence[Variant]) -> Iterator[Variant]:
    """Leave out contexts that are longer than those of the models: they change nothing."""
    for variant, shorter in zip_longest(variants, variants[1:]):
        if shorter is None or (shorter.kv_type, shorter.plans) != (variant.kv_type, variant.plans):
            yield variant


def _fit_together(plans: tuple[LoadPlan, LoadPlan], available: Mapping[str, int]) -> bool:
    """Whether two models fit, whichever is loaded first."""
    first, second = plans
    return _fits_after(first, second, available) and _fits_after(second, first, available)


def _fits_after(first: LoadPlan, second: LoadPlan, available: Mapping[str, int]) -> bool:
    """Whether the second model fits into the memory that the first one leaves free."""
    taken = first.all_taken(available)
    needs = least_bytes(second.useful)
    return all(needed <= available.get(memory, 0) - taken.get(memory, 0) for memory, needed in needs.items())


def _shares(first: Mapping[str, int], second: Mapping[str, int], available: Mapping[str, int]) -> dict[str, Share]:
    memories = [memory for memory in available if first.get(memory) or second.get(memory)]
    return {memory: Share((first.get(memory, 0), second.get(memory, 0)), available[memory]) for memory in memories}


def _remedy(fitting: Sequence[Variant], least: Variant, available: Mapping[str, int]) -> str:
    if not fitting:
        return f"They do not fit with {least} either ({_numbers(least, available)}); choose a smaller model."
    return f"Both fit with {', or with '.join(_chosen(fitting, available))}. Set it in config.toml."


def _chosen(fitting: Sequence[Variant], available: Mapping[str, int]) -> Iterator[str]:
    plain = next((variant for variant in fitting if not variant.kv_type), None)
    other = next((variant for variant in fitting if variant.kv_type), None)
    for variant in (plain, other if plain is None or (other and other.context > plain.context) else None):
        if variant is not None:
            yield f"{variant} ({_numbers(variant, available)})"


def _numbers(variant: Variant, available: Mapping[str, int]) -> str:
    first, second = (least_bytes(plan.useful) for plan in variant.plans)
    return Advice(_shares(first, second, available), "").numbers
