"""The client library's own tests against our server: `python -m tests.outside.openai_python MODEL.gguf`.

Fetches the source distribution of `openai` (the version that is installed here) and what its tests need into a folder
of its own, and runs those of its tests that are about routes we have: written for a mock of OpenAI's API, they check
every field of every reply. All of them must pass but for EXPECTED, each with its reason.
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
from tests.outside.served import chat_server, embedding_server

NEEDED = ("aiohttp", "httpx2", "pytest", "pytest-asyncio", "rich")
CHAT_TESTS: Mapping[str, str] = {  # files, and which of their tests are about routes that we have
    "chat/test_completions.py": "create",
    "test_completions.py": "create",
    "test_models.py": "list or retrieve",
}
EMBEDDING_TESTS: Mapping[str, str] = {"test_embeddings.py": "create"}
CHAT_NAMES = ("gpt-6-astra", "gpt-3.5-turbo-instruct")  # of models that the tests ask for
EMBEDDING_NAMES = ("text-embedding-3-small",)

_OF_A_MOCK = (
    'logit_bias {"foo": 0} names no token, and max_tokens 0 or best_of 0 asks for no reply; OpenAI refuses both'
)
_STRICT = (
    "the client asks for base64, which OpenAI's API sends, and then takes only lists where it checks types strictly"
)
EXPECTED: Mapping[str, str] = {  # tests that fail with some client, and why
    "chat.test_completions.test_method_create_with_all_params_overload_1": _OF_A_MOCK,
    "chat.test_completions.test_method_create_with_all_params_overload_2": _OF_A_MOCK,
    "test_completions.test_method_create_with_all_params_overload_1": _OF_A_MOCK,
    "test_completions.test_method_create_with_all_params_overload_2": _OF_A_MOCK,
    "test_embeddings.test_method_create": _STRICT,
    "test_embeddings.test_raw_response_create": _STRICT,
    "test_embeddings.test_streaming_response_create": _STRICT,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="A GGUF file, whose tokenizer and template are used.")
    parser.add_argument("--folder", type=Path, help="Where what is fetched is kept; a temporary one, if not given.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        return _report(dict(_run(arguments.model, (arguments.folder or Path(temporary)).absolute())))


def _run(model: Path, folder: Path) -> Iterator[tuple[str, bool]]:
    """Each test that ran, and whether it passed."""
    source, python = _fetched(folder)
    with chat_server(model, dict.fromkeys(CHAT_NAMES, "*")) as url:
        for file, which in CHAT_TESTS.items():
            yield from _outcomes(python, source, file, which, url)
    with embedding_server(dict.fromkeys(EMBEDDING_NAMES, "*")) as url:
        for file, which in EMBEDDING_TESTS.items():
            yield from _outcomes(python, source, file, which, url)


def _fetched(folder: Path) -> tuple[Path, Path]:
    """The unpacked distribution, and a Python that has what its tests need."""
    name = f"openai-{version('openai')}"
    wanted = name.replace("-", "==", 1)
    installed = Environments(folder).install(Environment("environment", "pip", [wanted, *NEEDED]))
    if not (folder / name).exists():
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
        subprocess.run([*pip, "--no-binary", "openai", "-d", str(folder), wanted], check=True)
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # before Python 3.11.4 there is none
            archive.extractall(folder)  # noqa: S202
    return folder / name, Path(installed.program("python"))


def _outcomes(python: Path, source: Path, file: str, which: str, url: str) -> Iterator[tuple[str, bool]]:
    report = source.parent / "report.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=no", f"--junitxml={report}", "-k", which]
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
    """Print what failed, and whether that was to be expected. 1 where it was not."""
    known = {name: name.partition("#")[0].partition("[")[0] for name in outcomes}
    failed = [name for name, passed in outcomes.items() if not passed]
    odd = [name for name in failed if known[name] not in EXPECTED]
    mended = {name for name in EXPECTED if all(outcomes[it] for it in outcomes if known[it] == name)}
    print(f"{len(outcomes)} tests: {len(outcomes) - len(failed)} passed, {len(failed)} failed")
    for name in odd:
        print(f"  not expected: {name}")
    for name, reason in EXPECTED.items():
        print(f"  expected{' (and it passed)' if name in mended else ''}: {name}: {reason}")
    return 1 if odd or mended or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
