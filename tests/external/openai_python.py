"""Run the openai library's own tests against Inglenook: `python -m tests.external.openai_python MODEL.gguf`.

Downloads the source distribution of the installed version of `openai` and the dependencies of its tests, and runs the
tests of routes that Inglenook has. The tests are written for a mock of OpenAI's API and check every field of every
reply. All must pass except those in EXPECTED.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

from tests.clients.environments import Environment, Environments
from tests.external.served import chat_server, embedding_server

NEEDED = ("aiohttp", "httpx2", "pytest", "pytest-asyncio", "rich")
CHAT_TESTS: Mapping[str, str] = {  # test files, and a selection of the tests for routes that Inglenook has
    "chat/test_completions.py": "create",
    "test_completions.py": "create",
    "test_models.py": "list or retrieve",
}
EMBEDDING_TESTS: Mapping[str, str] = {"test_embeddings.py": "create"}
CHAT_NAMES = ("gpt-6-astra", "gpt-3.5-turbo-instruct")  # models in the tests' requests
EMBEDDING_NAMES = ("text-embedding-3-small",)

_MOCK_VALUES = 'the mock accepts logit_bias {"foo": 0}, max_tokens 0, and best_of 0, which OpenAI and Inglenook refuse'
_STRICT = "the client requests base64 and gets it, as from OpenAI, but its strict type checks accept only lists"
EXPECTED: Mapping[str, str] = {  # tests that fail with at least one HTTP transport, and the reasons
    "chat.test_completions.test_method_create_with_all_params_overload_1": _MOCK_VALUES,
    "chat.test_completions.test_method_create_with_all_params_overload_2": _MOCK_VALUES,
    "test_completions.test_method_create_with_all_params_overload_1": _MOCK_VALUES,
    "test_completions.test_method_create_with_all_params_overload_2": _MOCK_VALUES,
    "test_embeddings.test_method_create": _STRICT,
    "test_embeddings.test_raw_response_create": _STRICT,
    "test_embeddings.test_streaming_response_create": _STRICT,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file; only its tokenizer and chat template are used")
    parser.add_argument("--folder", type=Path, help="folder for the downloads (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        return _report(dict(_run(arguments.model, (arguments.folder or Path(temporary)).absolute())))


def _run(model: Path, folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield each test that ran, and whether it passed."""
    source, python = _fetch(folder)
    with chat_server(model, dict.fromkeys(CHAT_NAMES, "*")) as url:
        for file, selection in CHAT_TESTS.items():
            yield from _outcomes(python, source, file, selection, url)
    with embedding_server(dict.fromkeys(EMBEDDING_NAMES, "*")) as url:
        for file, selection in EMBEDDING_TESTS.items():
            yield from _outcomes(python, source, file, selection, url)


def _fetch(folder: Path) -> tuple[Path, Path]:
    """Return the folder of the unpacked distribution, and a Python with the dependencies of its tests."""
    name = f"openai-{version('openai')}"
    requirement = name.replace("-", "==", 1)
    installed = Environments(folder).install(Environment("environment", "pip", [requirement, *NEEDED]))
    if not (folder / name).exists():
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
        subprocess.run([*pip, "--no-binary", "openai", "-d", str(folder), requirement], check=True)
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has no filters
            archive.extractall(folder)  # noqa: S202
    return folder / name, Path(installed.program("python"))


def _outcomes(python: Path, source: Path, file: str, selection: str, url: str) -> Iterator[tuple[str, bool]]:
    report = source.parent / "report.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=no", f"--junitxml={report}", "-k", selection]
    environment = {**os.environ, "TEST_API_BASE_URL": f"{url}/v1"}
    subprocess.run(
        [str(python), "-m", "pytest", *options, f"tests/api_resources/{file}"], cwd=source, env=environment, check=False
    )
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314
        module = case.attrib["classname"].removeprefix("tests.api_resources.").rpartition(".")[0]
        name = case.attrib["name"]
        passed = not any(case.findall(outcome) for outcome in ("failure", "error", "skipped"))
        yield f"{module}.{name}#{case.attrib['classname'].rpartition('.')[2]}", passed


def _report(outcomes: Mapping[str, bool]) -> int:
    """Print the failed tests. Return 1 if the failures differ from EXPECTED, else 0."""
    known = {name: name.partition("#")[0].partition("[")[0] for name in outcomes}
    failed = [name for name, passed in outcomes.items() if not passed]
    unexpected = [name for name in failed if known[name] not in EXPECTED]
    fixed = {name for name in EXPECTED if all(outcomes[it] for it in outcomes if known[it] == name)}
    print(f"{len(outcomes)} tests: {len(outcomes) - len(failed)} passed, {len(failed)} failed")
    for name in unexpected:
        print(f"  unexpected failure: {name}")
    for name, reason in EXPECTED.items():
        print(f"  {'expected to fail, but passed' if name in fixed else 'expected failure'}: {name}: {reason}")
    return 1 if unexpected or fixed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
