"""Run xllamacpp in a child process of `tests.bench.peers.xllamacpp`.

    python -P xllamacpp_child.py {"model": path, "threads": n, "streams": n, "context": tokens of all streams}

The protocol is lines of JSON on stdin and stdout. The first line on stdout reports that the model is loaded. Then each
line on stdin is a load, answered by a line on stdout, until stdin is closed. Times are seconds of `time.perf_counter`.

    out   {"build": text, "address": of its HTTP server}
    in    {"prompts": [[token id]], "output_tokens": n}
    out   {"sent": time, "arrivals": [[time]], "tokens": [n]}  or  {"error": text}

It imports only the standard library and xllamacpp.
"""

import importlib
import json
import os
import signal
import sys
import time
from typing import Any


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # The native library may print. Send its output to stderr, because stdout is for the protocol.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    package = importlib.import_module("xllamacpp")
    server = _server(package, json.loads(sys.argv[1]))
    print(json.dumps({"build": _build(package), "address": server.listening_address}), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_run(server, request["prompts"], request["output_tokens"])), file=out)


def _server(package: Any, options: dict[str, Any]) -> Any:
    params = package.CommonParams()
    params.model.path = options["model"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    params.n_parallel = options["streams"]
    params.n_ctx = options["context"]
    params.cache_ram_mib = 0  # cached old prompts would cost time and are never used
    params.verbosity = 0
    params.ui = False
    return package.Server(params)


def _build(package: Any) -> str:
    info = package.BUILD_INFO
    parts = [part.removesuffix("= 1 ").strip() for part in package.get_system_info().replace("CPU :", "").split("|")]
    return f"{package.__version__} with {info['compiler']} for {info['build_target']}: {' '.join(parts).strip()}"


def _run(server: Any, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
    """Send all prompts in one request, which the server splits into one stream each."""
    arrivals: list[list[float]] = [[] for _ in prompts]
    tokens = [0 for _ in prompts]
    errors = []

    def record(event: dict[str, Any] | None) -> None:
        now = time.perf_counter()
        if event is None:  # end of the stream
            return
        if "choices" not in event:
            errors.append(json.dumps(event))
            return
        for choice in event["choices"]:
            index = choice["index"]
            if "usage" in event:
                tokens[index] = event["usage"]["completion_tokens"]
            # Tokens may have no text. If no token of a reply has any, the arrival of the reply's last event counts.
            if choice["text"] or (tokens[index] and not arrivals[index]):
                arrivals[index].append(now)

    options = {"max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "stream": True}
    sent = time.perf_counter()
    server.handle_completions({"prompt": prompts if len(prompts) > 1 else prompts[0], **options}, record)
    if errors:
        return {"error": errors[0]}
    return {"sent": sent, "arrivals": arrivals, "tokens": tokens}


if __name__ == "__main__":
    main()
