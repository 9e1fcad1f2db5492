"""What a fresh interpreter loads: the layers hold at run time, and the command line starts without heavy libraries."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def roots_after(*statements: str) -> list[set[str]]:
    """What a fresh interpreter has loaded after each of `statements`, run one after another in the checkout."""
    told = "\nprint(*{name.partition('.')[0] for name in sys.modules})\n"
    code = "import sys\n" + "".join(statement + told for statement in statements)
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
def test_what_starts_light(modules: tuple[str, ...], heavy: set[str]) -> None:
    after = roots_after(*(f"import {module}" for module in modules))
    loaded = dict(zip(modules, after, strict=True))
    assert {module: heavy & roots for module, roots in loaded.items() if heavy & roots} == {}


def test_help_imports_no_torch() -> None:
    code = "sys.argv = ['ingle', '--help']\nfrom app.cli import main\nmain()"
    [loaded] = roots_after(code)
    assert not {"torch", "numpy", "tokenizers", "huggingface_hub"} & loaded


# The weights and the engine have torch and what comes with it, numpy, tokenizers, safetensors, gguf.
MORE = {"click", "rich", "httpx", "huggingface_hub", "jinja2", "platformdirs", "transformers"}


def imports_of(layer: str) -> str:
    """Statements that import all of it."""
    files = sorted(path.relative_to(ROOT) for path in (ROOT / layer).rglob("*.py"))
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    return "\n".join(f"import {name}" for name in names)


def test_no_layer_loads_one_above_it_or_more_than_it_needs() -> None:
    weights, engine = roots_after(imports_of("quant"), imports_of("engine"))
    [terminal] = roots_after(imports_of("tui"))
    assert not {"engine", "app", "tui", *MORE} & weights
    assert not {"app", "tui", *MORE} & engine
    assert not {"app", "engine", "quant"} & terminal
