"""Tiers: which one is chosen for a processor, and which instructions the code of each contains."""

import re
import struct
from collections.abc import Iterable
from typing import Any

import pytest
from llvmlite import binding

import engine.backends.cpu.units  # noqa: F401  # defines all kernels
from quant.cpu import native, tiers
from quant.cpu.float16 import narrow, widen
from quant.cpu.integer_dots import dot, dot_of_words
from quant.cpu.kernel import KERNELS, Kernel
from quant.cpu.native import compile_kernels
from quant.cpu.tiers import CHOICES, TIERS, Target, available, choose
from quant.cpu.vector import F16, Emit, F16x16, F32x16, I8x64, I32x16
from quant.errors import UnsupportedTier

BY_NAME = {tier.name: tier for tier in TIERS}
LINUX, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
NOTHING = frozenset[str]()


def on_a_processor_with(monkeypatch: pytest.MonkeyPatch, features: frozenset[str], triple: str = LINUX) -> None:
    monkeypatch.setattr(tiers, "host_features", lambda: features)
    monkeypatch.setattr(tiers, "host_triple", lambda: triple)


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.name)
def test_auto_chooses_the_fastest_executable_tier(monkeypatch: pytest.MonkeyPatch, tier: tiers.Tier) -> None:
    on_a_processor_with(monkeypatch, tier.required | {"bmi2"})
    assert choose("auto") == choose(tier.name)
    assert choose("auto").tier == tier.name
    for feature in tier.required:
        on_a_processor_with(monkeypatch, tier.required - {feature})
        assert choose("auto").tier != tier.name


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.name)
def test_target_has_the_features_of_the_tier_only(monkeypatch: pytest.MonkeyPatch, tier: tiers.Tier) -> None:
    everything = frozenset().union(*(it.required | it.optional for it in TIERS), {"avx512bf16"})
    on_a_processor_with(monkeypatch, everything)
    assert choose(tier.name).features == tier.required | tier.optional | {"sse2"}
    on_a_processor_with(monkeypatch, tier.required)
    assert choose(tier.name).features == tier.required | {"sse2"}


def test_last_tier_requires_no_features() -> None:
    assert TIERS[-1].required == NOTHING
    assert CHOICES == ("auto", "avx512", "avx2-vnni", "avx2", "portable")


def test_unsupported_tier_error_lists_supported_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_processor_with(monkeypatch, BY_NAME["avx2"].required)
    with pytest.raises(UnsupportedTier, match="avxvnni") as refused:
        choose("avx2-vnni")
    assert refused.value.remedy == "Set cpu_tier to one of: auto, avx2, portable."
    assert [tier.name for tier in available()] == ["avx2", "portable"]


def test_arm_has_the_portable_tier_with_optional_dot_products(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_processor_with(monkeypatch, frozenset({"dotprod", "neon", "sve"}), ARM)
    assert (choose("auto").tier, choose("auto").flags) == ("portable", "+dotprod,+neon")
    on_a_processor_with(monkeypatch, NOTHING, "arm64-apple-darwin24.0")
    assert (choose("auto").architecture, choose("auto").flags) == ("aarch64", "+neon")


def test_baseline_is_used_if_features_cannot_be_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> dict[str, bool]:
        raise RuntimeError("not here")

    monkeypatch.setattr(binding, "get_host_cpu_features", unknown)
    monkeypatch.setattr(tiers, "host_triple", lambda: LINUX)
    assert choose("auto").flags == "+sse2"
    monkeypatch.setattr(tiers, "host_triple", lambda: "arm64-apple-darwin24.0")
    assert choose("auto").flags == "+dotprod,+neon"


# -- the code of each tier, for any processor and system

TARGETS = {
    "avx512": BY_NAME["avx512"].target(LINUX, NOTHING),
    "avx2-vnni": BY_NAME["avx2-vnni"].target(LINUX, NOTHING),
    "avx2": BY_NAME["avx2"].target(LINUX, NOTHING),
    "portable": BY_NAME["portable"].target(LINUX, BY_NAME["portable"].optional - {"dotprod"}),
    "sse2": BY_NAME["portable"].target(LINUX, NOTHING),
    "arm with dot products": BY_NAME["portable"].target(ARM, frozenset({"dotprod"})),
    "arm": BY_NAME["portable"].target(ARM, NOTHING),
    "Windows": BY_NAME["avx2"].target("x86_64-pc-windows-msvc-elf", NOTHING),  # MCJIT links only ELF
}
# Patterns of instructions in assembly, and the targets that may use them.
INSTRUCTIONS = {
    r"%zmm|%[xy]mm(1[6-9]|[23]\d)|%k[0-7]": {"avx512"},
    "%ymm": {"avx512", "avx2-vnni", "avx2", "Windows"},
    r"\bvpdpbusd\b": {"avx512", "avx2-vnni"},
    r"\bvpdpwssd\b": {"avx512", "avx2-vnni"},
    r"\bvpmaddubsw\b": {"avx2", "Windows"},
    r"\bpmaddubsw\b": {"portable"},
    r"\bvfmadd": {"avx512", "avx2-vnni", "avx2", "Windows"},
    r"\bfmla\b": {"arm", "arm with dot products"},
    r"\bvcvtph2ps\b": {"avx512", "avx2-vnni", "avx2", "Windows"},
    r"\bsdot\b": {"arm with dot products"},
}


def operations(e: Emit, x: Any, out: Any) -> None:
    """Emit the operations that differ between tiers, including those that no kernel uses."""
    codes, total = e.load(x, I8x64), e.load(out, I32x16)
    values = (
        *(dot(e, total, codes, e.load(x, I32x16), bits) for bits in (7, 8)),
        dot_of_words(e, total, e.load(x, I32x16), e.load(e.at(x, 64), I32x16)),
        e.lookup(codes, range(16)),
        e.lookup_floats(total, [index / 3 for index in range(16)]),
        narrow(e, e.fma(widen(e, e.load(x, F16x16)), e.nearest(e.load(x)), e.load(out))),
        narrow(e, widen(e, e.load(x, F16))),
    )
    for index, value in enumerate(values):
        e.store(e.at(out, 64 * index), value)
    e.pause()


def some_kernels() -> list[Kernel]:
    """Return one kernel of each kind: kernels of other layouts and sizes have the same code."""
    by_kind = {re.sub(r"\d+", "", made.name): made for made in reversed(KERNELS.values())}
    return [*by_kind.values(), Kernel("operations", operations, returns=False)]


def assembly(kernels: Iterable[Kernel], target: Target) -> tuple[str, bytes]:
    """Return the assembly text and the object file of one compilation, as `compile_kernels` makes it."""
    machine, module = native._machine(target), native._optimized(kernels, target)
    return machine.emit_assembly(module), machine.emit_object(module)


def undefined_symbols(code: bytes) -> list[str]:
    """Return the undefined symbols of a 64-bit ELF object."""
    (headers_at,), (size, count) = struct.unpack_from("<Q", code, 0x28), struct.unpack_from("<HH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, headers_at + size * i) for i in range(count)]
    missing = []
    for _, kind, _, _, start, length, strings, _, _, _ in headers:
        for at in range(start + 24, start + length, 24) if kind == 2 else ():  # symbol table; the first entry is null
            name, _, _, section = struct.unpack_from("<IBBH", code, at)
            if section == 0:
                text = headers[strings][4] + name
                missing.append(code[text : code.index(b"\0", text)].decode())
    return missing


@pytest.fixture(scope="module", autouse=True)
def every_target() -> None:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()


@pytest.mark.share(1)
@pytest.mark.parametrize("name", TARGETS)
def test_code_uses_only_the_tiers_instructions_and_no_library(name: str) -> None:
    text, code = assembly(some_kernels(), TARGETS[name])
    for instruction, users in INSTRUCTIONS.items():
        assert bool(re.search(instruction, text)) == (name in users), instruction
    assert undefined_symbols(code) == []


def test_undefined_symbols_finds_a_library_call() -> None:
    def rounds(e: Emit, x: Any) -> None:
        e.store(x, e.call("llvm.rint.v16f32", F32x16, e.load(x)))

    code = compile_kernels([Kernel("rounds", rounds, returns=False)], TARGETS["sse2"])
    assert undefined_symbols(code) == ["rintf"]


def test_code_for_apple_uses_dot_products() -> None:
    target = Target("portable", "arm64-apple-darwin", "generic", frozenset({"neon", "dotprod"}))
    text, _ = assembly(some_kernels(), target)
    assert re.search(r"\bsdot\b", text)
    assert not re.search(r"^\s+(bl|b)\s+_", text, re.MULTILINE)  # the code calls no external functions
