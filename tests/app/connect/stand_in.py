"""A stand-in for an agent: it sends a prompt with a tool, sends the result of a call, and prints the reply.

Run as `stand_in.py URL MODEL KEY PROMPT`. The environment variable CHANGES puts a random text before the prompt;
MOST limits the tokens of a reply.
"""

import json
import os
import secrets
import sys
import urllib.error
import urllib.request
from typing import Any

TOOL = {"type": "function", "function": {"name": "list", "parameters": {"type": "object", "properties": {}}}}


def ask(url: str, model: str, key: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": model, "messages": messages, "tools": [TOOL], "max_tokens": int(os.environ.get("MOST", "500"))}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        reply: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return reply


def main(url: str, model: str, key: str, prompt: str) -> int:
    start = [{"role": "system", "content": secrets.token_hex(400)}] if "CHANGES" in os.environ else []
    messages: list[dict[str, Any]] = [*start, {"role": "user", "content": prompt}]
    try:
        reply = ask(url, model, key, messages)
        if calls := reply.get("tool_calls"):
            result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "no files"}
            reply = ask(url, model, key, [*messages, reply, result])
    except urllib.error.HTTPError as problem:
        print(f"{problem.code}: {problem.read().decode()}", file=sys.stderr)
        return 1
    print(reply["content"])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
