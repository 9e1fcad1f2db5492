"""What a fresh interpreter loads: the layers hold at run time, and the command line starts without heavy libraries."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def modules_after(statement: str) -> set[str]:
    """The modules a fresh interpreter has loaded after `statement`, run in the checkout."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def roots(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize(
    "module", ["engine.blocks", "engine.scheduler", "engine.request", "engine.config", "quant.gguf", "quant.errors"]
)
def test_planning_and_parsing_need_no_torch(module: str) -> None:
    assert not {"torch", "numpy"} & roots(modules_after(f"import {module}"))


@pytest.mark.parametrize(
    "module",
    [
        "app.cli",
        "app.commands.run",
        "app.commands.pull",
        "app.commands.ls",
        "app.commands.rm",
        "app.terminal_chat.session",
    ],
)
def test_the_command_line_starts_light(module: str) -> None:
    loaded = roots(modules_after(f"import {module}"))
    assert not {"torch", "numpy", "tokenizers", "huggingface_hub", "jinja2", "httpx", "rich"} & loaded


def test_help_imports_no_torch() -> None:
    code = "import sys; sys.argv = ['ingle', '--help']\nfrom app.cli import main\nmain()"
    assert not {"torch", "numpy", "tokenizers", "huggingface_hub"} & roots(modules_after(code))


# The weights and the engine have torch and what comes with it, numpy, tokenizers, safetensors.
MORE = {"click", "rich", "httpx", "huggingface_hub", "jinja2", "platformdirs", "gguf", "transformers"}


@pytest.mark.parametrize(
    ("layer", "others"),
    [
        ("quant", {"engine", "app", "tui", *MORE}),
        ("engine", {"app", "tui", *MORE}),
        ("tui", {"app", "engine", "quant"}),
    ],
)
def test_no_layer_loads_one_above_it_or_more_than_it_needs(layer: str, others: set[str]) -> None:
    files = sorted(path.relative_to(ROOT) for path in (ROOT / layer).rglob("*.py"))
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    assert not others & roots(modules_after("\n".join(f"import {name}" for name in names)))
