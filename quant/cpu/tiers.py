"""Tiers: which instructions kernels are made of, and which of them this processor can execute.

A tier is what a processor must have. What code is compiled for, a `Target`, is that and no more, whatever the machine
that compiles it has besides: so that every tier can be tried on a machine that has a higher one. Features are LLVM's
words. Refuses to know what kernels do with them.
"""

from dataclasses import dataclass

from quant.errors import UnsupportedTier


@dataclass(frozen=True, slots=True)
class Target:
    """What code is compiled for."""

    tier: str
    triple: str
    cpu: str  # the plainest processor of its kind; what it has, code may use
    features: frozenset[str]

    @property
    def architecture(self) -> str:
        return _architecture(self.triple)

    @property
    def flags(self) -> str:
        """The features as LLVM reads them."""
        return ",".join(f"+{name}" for name in sorted(self.features))

    def has(self, *features: str) -> bool:
        """Whether there is any of these."""
        return not self.features.isdisjoint(features)


@dataclass(frozen=True, slots=True)
class Tier:
    """A processor must have all of `required`; of `optional`, code uses what is there."""

    name: str
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    cpu: str = ""  # "": the plainest one of the architecture

    def target(self, triple: str, there: frozenset[str]) -> Target:
        """What its code is compiled for on a processor with the features `there`."""
        cpu, always = _PLAINEST.get(_architecture(triple), ("", frozenset[str]()))
        return Target(self.name, triple, self.cpu or cpu, always | self.required | self.optional & there)


_AVX2 = frozenset({"sse2", "ssse3", "sse4.1", "avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"}

# The fastest first.
TIERS = (
    Tier("avx512", _AVX512, cpu="x86-64-v4"),
    Tier("avx2-vnni", _AVX2 | {"avxvnni"}, cpu="x86-64-v3"),
    Tier("avx2", _AVX2, cpu="x86-64-v3"),
    Tier("portable", optional=frozenset({"ssse3", "sse4.1", "dotprod"})),
)
CHOICES = ("auto", *(tier.name for tier in TIERS))

_PLAINEST = {  # of an architecture: LLVM's name of it, and what it always has
    "x86_64": ("x86-64", frozenset({"sse2"})),
    "aarch64": ("generic", frozenset({"neon"})),
}


def host_triple() -> str:
    # Not at the top: names of tiers are wanted where no compiler is.
    from llvmlite import binding

    triple: str = binding.get_process_triple()
    return triple


def host_features() -> frozenset[str]:
    """What this processor and its operating system have."""
    from llvmlite import binding

    try:
        found = {name for name, there in binding.get_host_cpu_features().items() if there}
    except RuntimeError:  # LLVM cannot tell on every system
        found = set()
    if host_triple().startswith(("arm64-apple", "aarch64-apple")):
        found.add("dotprod")  # in every processor that macOS runs on
    return frozenset(found)


def available() -> tuple[Tier, ...]:
    """The tiers that this processor can execute, the fastest first."""
    there = host_features()
    return tuple(tier for tier in TIERS if tier.required <= there)


def choose(name: str) -> Target:
    """One of CHOICES on this machine. Raises UnsupportedTier for one that this processor cannot execute."""
    able = {tier.name: tier for tier in available()}
    if name != "auto" and name not in able:
        (wanted,) = (tier for tier in TIERS if tier.name == name)
        lacking = ", ".join(sorted(wanted.required - host_features()))
        raise UnsupportedTier(
            f"This processor cannot execute the {name} kernels: it has no {lacking}",
            f"Set cpu_tier to one of: {', '.join(('auto', *able))}.",
        )
    tier = next(iter(able.values())) if name == "auto" else able[name]
    return tier.target(host_triple(), host_features())


def _architecture(triple: str) -> str:
    first = triple.partition("-")[0]
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(first, first)
