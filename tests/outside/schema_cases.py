"""Requests that schemathesis makes of schemas, against our server: `python -m tests.outside.schema_cases MODEL.gguf`.

Of two descriptions: our own, as /openapi.json has it, and OpenAI's for the routes that both have, made of the types of
its client library, which are generated from its published description. Half of the requests keep to the schema, half do
not. None may end in an error of the server, and what is answered must be what is described. Fetches schemathesis into
an environment of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openai.types import Completion, completion_create_params
from openai.types.chat import ChatCompletion
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import TypeAdapter

from tests.clients.environments import Environment, Environments
from tests.outside.served import chat_server

NAME = "gpt-4o"  # that requests by OpenAI's description give
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
OTHER_CASES = 100  # of each route that generates nothing
CHECKS = ("not_a_server_error", "response_schema_conformance", "content_type_conformance")
REF = "#/components/schemas/{model}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="A GGUF file, whose tokenizer and template are used.")
    parser.add_argument("--folder", type=Path, help="Where what is fetched is kept; a temporary one, if not given.")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, chat_server(arguments.model, {NAME: "*"}) as url:
        folder = (arguments.folder or Path(temporary)).absolute()
        installed = Environments(folder).install(Environment("environment", "pip", ["schemathesis>=4.32,<5"]))
        theirs = folder / "openai.json"
        theirs.write_text(json.dumps(openai_description()))
        each, paths = arguments.cases // 4, f"^({CHAT}|{COMPLETION})$"
        options = ["--seed", str(arguments.seed), "--url", url]
        runs = [
            [f"{url}/openapi.json", "--include-path-regex", paths, "--max-examples", str(each)],
            [str(theirs), "--max-examples", str(each)],
            [f"{url}/openapi.json", "--exclude-path-regex", paths, "--max-examples", str(OTHER_CASES)],
        ]
        command = [installed.program("python"), "-m", "schemathesis.cli", "run", "--phases", "coverage,fuzzing"]
        command += ["--mode", "all", "--continue-on-failure", "--checks", ",".join(CHECKS)]
        return max([subprocess.run([*command, *run, *options], cwd=folder, check=False).returncode for run in runs])


def openai_description() -> dict[str, Any]:
    """OpenAI's, cut to the routes that generate."""
    bodies = {
        CHAT: (chat_create_params.CompletionCreateParamsNonStreaming, ChatCompletion),
        COMPLETION: (completion_create_params.CompletionCreateParamsNonStreaming, Completion),
    }
    schemas: dict[str, Any] = {}
    paths = {path: {"post": _operation(schemas, asked, told)} for path, (asked, told) in bodies.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "OpenAI", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(schemas: dict[str, Any], asked: object, told: object) -> dict[str, Any]:
    request, reply = _schema(schemas, asked), _schema(schemas, told)
    request["properties"]["model"] = {"enum": [NAME]}
    return {
        "requestBody": {"required": True, "content": _json(request)},
        "responses": {
            "200": {"description": "The reply", "content": _json(reply)},
            "4XX": {"description": "What is wrong", "content": _json({"type": "object", "required": ["error"]})},
        },
    }


def _schema(schemas: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Of a type; what it refers to is put into `schemas`."""
    with warnings.catch_warnings(action="ignore"):
        schema = TypeAdapter[Any](kind).json_schema(ref_template=REF)
    schemas.update(schema.pop("$defs", {}))
    return schema


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


if __name__ == "__main__":
    sys.exit(main())
