"""Send requests that schemathesis generates from schemas: `python -m tests.external.schema_cases MODEL.gguf`.

The schemas are Inglenook's /openapi.json, and OpenAI's for the routes that generate, built from the types of its client
library, which are generated from OpenAI's published schema. Half of the requests follow the schema, and half violate
it. No request may cause a server error, and every reply must match the schema. schemathesis is installed into a
separate environment.
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
from tests.external.served import chat_server

NAME = "gpt-4o"  # model name in the requests that follow OpenAI's schema
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
OTHER_CASES = 100  # number of requests to each route that does not generate
CHECKS = ("not_a_server_error", "response_schema_conformance", "content_type_conformance")
REF = "#/components/schemas/{model}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file; only its tokenizer and chat template are used")
    parser.add_argument("--folder", type=Path, help="folder for the downloads (default: a temporary folder)")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, chat_server(arguments.model, {NAME: "*"}) as url:
        folder = (arguments.folder or Path(temporary)).absolute()
        installed = Environments(folder).install(Environment("environment", "pip", ["schemathesis>=4.32,<5"]))
        openai_file = folder / "openai.json"
        openai_file.write_text(json.dumps(openai_description()))
        cases_per_run, paths = arguments.cases // 4, f"^({CHAT}|{COMPLETION})$"
        options = ["--seed", str(arguments.seed), "--url", url]
        runs = [
            [f"{url}/openapi.json", "--include-path-regex", paths, "--max-examples", str(cases_per_run)],
            [str(openai_file), "--max-examples", str(cases_per_run)],
            [f"{url}/openapi.json", "--exclude-path-regex", paths, "--max-examples", str(OTHER_CASES)],
        ]
        command = [installed.program("python"), "-m", "schemathesis.cli", "run", "--phases", "coverage,fuzzing"]
        command += ["--mode", "all", "--continue-on-failure", "--checks", ",".join(CHECKS)]
        return max([subprocess.run([*command, *run, *options], cwd=folder, check=False).returncode for run in runs])


def openai_description() -> dict[str, Any]:
    """Return OpenAI's schema for the routes that generate."""
    bodies = {
        CHAT: (chat_create_params.CompletionCreateParamsNonStreaming, ChatCompletion),
        COMPLETION: (completion_create_params.CompletionCreateParamsNonStreaming, Completion),
    }
    schemas: dict[str, Any] = {}
    paths = {
        path: {"post": _operation(schemas, request_type, reply_type)}
        for path, (request_type, reply_type) in bodies.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "OpenAI", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(schemas: dict[str, Any], request_type: object, reply_type: object) -> dict[str, Any]:
    request, reply = _schema(schemas, request_type), _schema(schemas, reply_type)
    request["properties"]["model"] = {"enum": [NAME]}
    return {
        "requestBody": {"required": True, "content": _json(request)},
        "responses": {
            "200": {"description": "The reply", "content": _json(reply)},
            "4XX": {"description": "The error", "content": _json({"type": "object", "required": ["error"]})},
        },
    }


def _schema(schemas: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Return the schema of a type. Adds every schema that it references to `schemas`."""
    with warnings.catch_warnings(action="ignore"):
        schema = TypeAdapter[Any](kind).json_schema(ref_template=REF)
    schemas.update(schema.pop("$defs", {}))
    return schema


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


if __name__ == "__main__":
    sys.exit(main())
