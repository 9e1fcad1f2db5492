"""Random requests of every API, as clients of all kinds send them: valid ones, and some with bad values."""

import random
from collections.abc import Callable, Mapping
from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
}
WORDS = (
    "the",
    "river",
    "runs",
    "past",
    "seven",
    "old",
    "mills",
    "and",
    "lighthouse",
    "keepers",
    "write",
    "home",
    "of tin",
)
MODEL = "soak"  # an alias of the served model

Body = dict[str, Any]
Request = tuple[str, str, Body | None]  # (method, path, body)


def words(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def messages(draw: random.Random) -> list[dict[str, str]]:
    """Return a conversation of random words. Some prompts are long, and some share a prefix."""
    turns = [{"role": "user", "content": words(draw, draw.choice((8, 40, 900)))}]
    for _ in range(draw.randrange(3)):
        turns += [{"role": "assistant", "content": words(draw, 20)}, {"role": "user", "content": words(draw, 20)}]
    return turns


FUNCTION: Body = {"name": "get_weather", "description": "Tells the weather", "parameters": SCHEMA}
TOOL: Body = {"type": "function", "function": FUNCTION}
SAMPLINGS: list[Body] = [{}, {"temperature": 0}, {"temperature": 1.3, "top_p": 0.9, "seed": 7}]
NAMED: Body = {"name": "weather", "schema": SCHEMA}
# Options that a request may have, by kind of request.
SHAPES: Mapping[str, list[Body]] = {
    "chat": [
        {},
        {"logprobs": True, "top_logprobs": 3},
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "required"},
        {"n": 2},
    ],
    "completion": [
        {},
        {"echo": True},
        {"logprobs": 2},
        {"guided_regex": "[a-z ]{1,40}"},
        {"best_of": 2, "stream": False},
    ],
    "response": [{}, {"store": False}, {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}],
    "message": [
        {},
        {"system": "Be brief."},
        {"tools": [{"name": "get_weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
    ],
    "ollama chat": [{}, {"format": SCHEMA}, {"format": "json"}, {"tools": [TOOL]}],
    "llama.cpp": [{}, {"grammar": 'root ::= ("yes" | "no") " "?'}, {"n_probs": 2}, {"json_schema": SCHEMA}],
    "status": [{}],
}


def chat(draw: random.Random, limit: int) -> Request:
    return "POST", "/v1/chat/completions", {"messages": messages(draw), "max_tokens": limit, **draw.choice(SAMPLINGS)}


def completion(draw: random.Random, limit: int) -> Request:
    return "POST", "/v1/completions", {"prompt": words(draw, 60), "max_tokens": limit, **draw.choice(SAMPLINGS)}


def response(draw: random.Random, limit: int) -> Request:
    return "POST", "/v1/responses", {"input": messages(draw), "max_output_tokens": limit}


def message(draw: random.Random, limit: int) -> Request:
    return "POST", "/v1/messages", {"messages": messages(draw), "max_tokens": limit}


def ollama_chat(draw: random.Random, limit: int) -> Request:
    options = {"num_predict": limit, **draw.choice(SAMPLINGS)}
    return "POST", "/api/chat", {"model": MODEL, "messages": messages(draw), "options": options}


def ollama_text(draw: random.Random, limit: int) -> Request:
    return "POST", "/api/generate", {"model": MODEL, "prompt": words(draw, 40), "options": {"num_predict": limit}}


def llama_text(draw: random.Random, limit: int) -> Request:
    return "POST", "/completion", {"prompt": words(draw, 60), "n_predict": limit}


def infill(draw: random.Random, limit: int) -> Request:
    return "POST", "/infill", {"input_prefix": words(draw, 20), "input_suffix": "return x", "n_predict": limit}


def tokens(draw: random.Random, limit: int) -> Request:
    bodies: list[tuple[str, Body]] = [
        ("/tokenize", {"content": words(draw, 2000)}),
        ("/detokenize", {"tokens": draw.choices(range(40_000), k=limit)}),
        ("/apply-template", {"messages": messages(draw)}),
        ("/v1/messages/count_tokens", {"messages": messages(draw)}),
    ]
    return "POST", *draw.choice(bodies)


def status_page(draw: random.Random, limit: int) -> Request:
    paths = ("/v1/models", "/health", "/metrics", "/api/tags", "/api/ps", "/props", "/openapi.json", "/nowhere")
    return "GET", draw.choice(paths), None


def embedding(draw: random.Random, limit: int) -> Request:
    return "POST", "/v1/embeddings", {"input": [words(draw, 30) for _ in range(draw.randint(1, 8))]}


def bad(draw: random.Random, limit: int) -> Request:
    values: list[Any] = [-1, "x", [], {}, 10**30, None, "\ud800", True]
    name = draw.choice(("temperature", "max_tokens", "stop", "tools", "response_format", "messages", "seed", "model"))
    path = draw.choice(("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"))
    return "POST", path, {name: draw.choice(values)}


# kind -> (function that makes a request, its relative frequency, whether its replies can be streamed)
Mix = Mapping[str, tuple[Callable[[random.Random, int], Request], float, bool]]

GENERATION: Mix = {
    "chat": (chat, 4, True),
    "completion": (completion, 3, True),
    "response": (response, 3, True),
    "message": (message, 3, True),
    "ollama chat": (ollama_chat, 3, True),
    "ollama text": (ollama_text, 2, True),
    "llama.cpp": (llama_text, 2, True),
    "infill": (infill, 2, True),
    "tokens": (tokens, 3, False),
    "status": (status_page, 1, False),
    "bad": (bad, 1, False),
}
EMBEDDING: Mix = {
    "embedding": (embedding, 4, False),
    "status": (status_page, 1, False),
}
OTHER_SHARE = 0.0055  # share of the requests that name the other model


def with_other_model(name: str, share: float = OTHER_SHARE) -> Mix:
    """Return the mix of a server that has a second model, which takes the memory of the first one.

    `share`: the share of the requests that name the second model, from 0 to 1.
    """

    def ask(draw: random.Random, limit: int) -> Request:
        return "POST", "/v1/completions", {"model": name, "prompt": words(draw, 60), "max_tokens": limit}

    others = sum(frequency for _, frequency, _ in GENERATION.values())
    return {**GENERATION, "other model": (ask, others * share / (1 - share), False)}


def random_request(mix: Mix, draw: random.Random) -> tuple[str, Request]:
    """Return the kind of a random request, and the request."""
    [kind] = draw.choices(list(mix), [weight for _, weight, _ in mix.values()])
    make, _, streams = mix[kind]
    method, path, body = make(draw, draw.choice((1, 8, 32, 64)))
    if body is not None and streams:
        body |= {"stream": draw.random() < 0.6} | draw.choice(SHAPES.get(kind, [{}]))
    return kind, (method, path, body)
