"""Tiers: the instruction sets that kernels are compiled for. Chooses one that this processor can execute.

A tier lists the features that a processor must have. Code is compiled for a `Target`, which has exactly the tier's
features even if the machine has more, so that every tier can be tested on a machine with a higher one. Feature names
are LLVM's.
"""

from dataclasses import dataclass

from quant.errors import UnsupportedTier


@dataclass(frozen=True, slots=True)
class Target:
    """The processor and features that code is compiled for."""

    tier: str
    triple: str
    cpu: str  # LLVM's name of the baseline processor, whose features code may use
    features: frozenset[str]

    @property
    def architecture(self) -> str:
        return _architecture(self.triple)

    @property
    def flags(self) -> str:
        """The features in LLVM's notation."""
        return ",".join(f"+{name}" for name in sorted(self.features))

    def has(self, *features: str) -> bool:
        """Whether the target has any of these features."""
        return not self.features.isdisjoint(features)


@dataclass(frozen=True, slots=True)
class Tier:
    """An instruction set. The processor must have all `required` features.

    Code also uses those of the `optional` features that the processor has.
    """

    name: str
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    cpu: str = ""  # "": the baseline of the architecture

    def target(self, triple: str, features: frozenset[str]) -> Target:
        """Return the target for a processor with these features."""
        cpu, always = _PLAINEST.get(_architecture(triple), ("", frozenset[str]()))
        return Target(self.name, triple, self.cpu or cpu, always | self.required | self.optional & features)


_AVX2 = frozenset({"sse2", "ssse3", "sse4.1", "avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"}

# fastest first
TIERS = (
    Tier("avx512", _AVX512, cpu="x86-64-v4"),
    Tier("avx2-vnni", _AVX2 | {"avxvnni"}, cpu="x86-64-v3"),
    Tier("avx2", _AVX2, cpu="x86-64-v3"),
    Tier("portable", optional=frozenset({"ssse3", "sse4.1", "dotprod"})),
)
CHOICES = ("auto", *(tier.name for tier in TIERS))

_PLAINEST = {  # LLVM's name of the baseline processor, and its features, by architecture
    "x86_64": ("x86-64", frozenset({"sse2"})),
    "aarch64": ("generic", frozenset({"neon"})),
}


def host_triple() -> str:
    # Imported here, because modules need the names of tiers without importing a compiler.
    from llvmlite import binding

    triple: str = binding.get_process_triple()
    return triple


def host_features() -> frozenset[str]:
    """Return the features of this processor and its operating system."""
    from llvmlite import binding

    try:
        found = {name for name, is_present in binding.get_host_cpu_features().items() if is_present}
    except RuntimeError:  # LLVM cannot detect them on every system
        found = set()
    if host_triple().startswith(("arm64-apple", "aarch64-apple")):
        found.add("dotprod")  # every processor that macOS runs on has it
    return frozenset(found)


def available() -> tuple[Tier, ...]:
    """Return the tiers that this processor can execute, the fastest first."""
    features = host_features()
    return tuple(tier for tier in TIERS if tier.required <= features)


def choose(name: str) -> Target:
    """Return the target of one of CHOICES. Raises UnsupportedTier if this processor cannot execute it."""
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
