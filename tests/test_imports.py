"""Imports load no upper layers, and no heavy libraries when the program starts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def roots_after(*statements: str) -> list[set[str]]:
    """Run `statements` in a fresh interpreter. Returns the loaded top-level modules after each of them."""
    report = "\nprint(*{name.partition('.')[0] for name, module in sys.modules.items() if module is not None})\n"
    code = "import sys\n" + "".join(statement + report for statement in statements)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()[-len(statements) :]]


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (
            (
                "engine.kv.blocks",
                "engine.scheduling.scheduler",
                "engine.request",
                "engine.config",
                "quant.gguf",
                "quant.errors",
            ),
            {"torch", "numpy"},
        ),
        (
            (
                "app.cli",
                "app.commands.run",
                "app.commands.pull",
                "app.commands.ls",
                "app.commands.rm",
                "app.chat_backend.session",
            ),
            {"torch", "numpy", "tokenizers", "huggingface_hub", "jinja2", "httpx", "rich"},
        ),
    ],
    ids=["planning and parsing", "the command line"],
)
def test_modules_load_no_heavy_libraries(modules: tuple[str, ...], heavy: set[str]) -> None:
    after = roots_after(*(f"import {module}" for module in modules))
    loaded = dict(zip(modules, after, strict=True))
    assert {module: heavy & roots for module, roots in loaded.items() if heavy & roots} == {}


def test_help_imports_no_torch() -> None:
    code = "sys.argv = ['ingle', '--help']\nfrom app.cli import main\nmain()"
    [loaded] = roots_after(code)
    assert not {"torch", "numpy", "tokenizers", "huggingface_hub"} & loaded


# Libraries that neither the weights nor the engine may load. These two load torch with its dependencies, numpy,
# tokenizers, safetensors, and gguf.
MORE = {"click", "rich", "httpx", "huggingface_hub", "jinja2", "platformdirs", "transformers"}


def imports_of(layer: str) -> str:
    """Return statements that import all modules of a layer."""
    files = sorted(path.relative_to(ROOT) for path in (ROOT / layer).rglob("*.py"))
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    return "\n".join(f"import {name}" for name in names)


def test_layers_load_no_upper_layers_and_only_needed_libraries() -> None:
    weights, engine = roots_after(imports_of("quant"), imports_of("engine"))
    [terminal] = roots_after(imports_of("tui"))
    assert not {"engine", "app", "tui", *MORE} & weights
    assert not {"app", "tui", *MORE} & engine
    assert not {"app", "engine", "quant"} & terminal
