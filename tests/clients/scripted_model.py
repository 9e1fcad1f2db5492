"""A model file with scripted replies and a long context, for agents whose prompts have up to 20,000 tokens.

Attention and MLP add nothing, so the logits depend only on the last token: each token of a reply predicts the next one.
The chat template selects the reply: it ends the prompt with the reply's first token. If the user's message contains
CALL_A_TOOL and the request has a known tool, the model calls the tool. The reply after the call depends on whether the
result contains NOTE_TEXT.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from tests.support.gguf_reader import Reader

CALL_A_TOOL = "CALL-A-TOOL"  # a user's message with this text makes the model call a tool
NOTE_TEXT = "ingle-note-42"  # this text is only in the tool's result
ANSWER = "The scripted model answers every message with this one sentence."
TOOL_RAN = "The tool ran and the scripted model has read its result."
TOOL_FAILED = "The tool gave the scripted model something else."

END = "<|im_end|>"
HIDDEN, HEAD, CONTEXT = 256, 64, 1 << 17
MARGIN = 8.0  # scale of the output weights; after the norm, the logit of the next token is MARGIN * sqrt(HIDDEN)

TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools\\n\\nYou are provided with function signatures within <tools></tools> ' -}}
{{- 'XML tags:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' -}}
{{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}' -}}
{{- '\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# The end of each template, which selects the reply.
SELECTION = """\
{%- set seen = namespace(start='answer', wanted=false) -%}
{%- for message in messages -%}
{%- if message.role == 'user' and message.content is string and 'WANTED' in message.content -%}
{%- set seen.wanted = true -%}
{%- elif message.role == 'tool' and message.content is string -%}
{%- set seen.start = 'ran' if 'NOTE_TEXT' in message.content else 'failed' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{%- if seen.wanted and seen.start == 'answer' -%}
{%- for tool in tools or [] -%}
{%- for name, argument, start in CALLED
  if name == tool.function.name and argument in tool.function.parameters.properties -%}
{%- set seen.start = start -%}
{%- endfor -%}
{%- endfor -%}
{%- endif -%}
{{- '<|start:' + seen.start + '|>' -}}
{%- endif -%}
"""


@dataclass(frozen=True)
class Call:
    """A tool call that the model makes if the request has this tool."""

    name: str
    arguments: Mapping[str, Any]


def chatml_call(call: Call) -> str:
    called = json.dumps({"name": call.name, "arguments": call.arguments})
    return f"<tool_call>\n{called}\n</tool_call>"


def harmony_call(call: Call) -> str:
    head = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
    return f"{head}{json.dumps(call.arguments)}<|call|>"


def gemma4_call(call: Call) -> str:
    return f"<|tool_call>call:{call.name}{gemma4_text(call.arguments)}<tool_call|>"


def gemma4_text(value: object) -> str:
    """Return a value as Gemma 4 writes it: keys without quotes, and strings in the marks of that model."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case Mapping():
            members = ",".join(f"{key}:{gemma4_text(member)}" for key, member in value.items())
            return f"{{{members}}}"
        case list():
            return f"[{','.join(map(gemma4_text, value))}]"
    return json.dumps(value)


@dataclass(frozen=True)
class Format:
    """How a family of models writes replies."""

    call: Callable[[Call], str]
    answer: str = "{}"  # around the text
    template: str = TEMPLATE


FORMATS: Mapping[str, Format] = {
    "chatml": Format(chatml_call),
    "harmony": Format(
        harmony_call,
        "<|channel|>analysis<|message|>It is known.<|end|><|start|>assistant<|channel|>final<|message|>{}",
    ),
    "gemma4": Format(gemma4_call, "<|channel>thought\nIt is known.\n<channel|>{}"),
}


def write_scripted_model(vocabulary: Path, path: Path, calls: Sequence[Call], form: Format = FORMATS["chatml"]) -> None:
    """Write the model to `path`, with the tokenizer of the GGUF file `vocabulary` and one token for each scripted text.

    Each call must have another tool name or first argument than the others.
    """
    reader = Reader(vocabulary)
    tokens: list[str] = list(reader.fields["tokenizer.ggml.tokens"].contents())
    types: list[int] = list(reader.fields["tokenizer.ggml.token_type"].contents())
    texts = {"answer": ANSWER, "ran": TOOL_RAN, "failed": TOOL_FAILED}
    scripts = {name: form.answer.format(text) for name, text in texts.items()}
    # tool names cannot be used here, because the server escapes them in the prompt
    starts = [f"call{number}" for number in range(len(calls))]
    scripts |= {start: form.call(call) for start, call in zip(starts, calls, strict=True)}
    chains = [list(_chain(tokens, types, name, text)) for name, text in scripts.items()]
    writer = gguf.GGUFWriter(path, "llama")
    template = chat_template(list(zip(calls, starts, strict=True)), form.template)
    _write_metadata(writer, reader, tokens, types, template)
    for name, values in _tensors(len(tokens), chains, tokens.index(END)):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def chat_template(calls: Sequence[tuple[Call, str]], template: str = TEMPLATE) -> str:
    """Return the chat template for these calls. Each call comes with the name of the start token of its reply."""
    called = json.dumps([(call.name, next(iter(call.arguments)), start) for call, start in calls])
    selection = SELECTION.replace("CALLED", called).replace("WANTED", CALL_A_TOOL).replace("NOTE_TEXT", NOTE_TEXT)
    return template + selection


def _chain(tokens: list[str], types: list[int], name: str, text: str) -> Iterator[int]:
    """Add the tokens of a reply to the vocabulary and yield their ids. The first is the start token."""
    taken = set(tokens)
    pieces = [f"<|start:{name}|>", *_pieces(text, taken)]
    for number, piece in enumerate(pieces):
        yield len(tokens)
        tokens.append(piece)
        types.append(gguf.TokenType.NORMAL if number else gguf.TokenType.CONTROL)


def _pieces(text: str, taken: set[str]) -> Sequence[str]:
    """Split `text` into new tokens of one or more words. Each occurs once, so that it determines its successor."""
    [(encoded, _)] = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    pieces, piece = [], ""
    for word in encoded.replace("Ġ", " Ġ").split(" "):
        piece += word
        if piece and piece not in taken:
            taken.add(piece)
            pieces.append(piece)
            piece = ""
    if piece:  # the last words are already a token, so they become part of the previous piece
        pieces[-1] += piece
    return pieces


def _write_metadata(
    writer: gguf.GGUFWriter,
    reader: Reader,
    tokens: Sequence[str],
    types: Sequence[int],
    template: str,
) -> None:
    for field in reader.fields.values():
        if field.name.startswith("tokenizer.ggml.") and not field.name.endswith((".tokens", ".token_type")):
            item = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], item)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_chat_template(template)
    writer.add_name("Scripted replies")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_head_count(HIDDEN // HEAD)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))


def _tensors(size: int, chains: Sequence[Sequence[int]], end: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield names and values of the weights. Each token of a reply has its own dimension; all other tokens share the
    first.
    """
    embedding = np.zeros((size, HIDDEN), np.float16)
    embedding[:, 0] = 1
    output = np.zeros((size, HIDDEN), np.float16)
    output[end, 0] = MARGIN
    dimension = 0
    for chain in chains:
        for token, successor in zip(chain, [*chain[1:], end], strict=True):
            dimension += 1
            embedding[token] = 0
            embedding[token, dimension] = 1
            output[successor, dimension] = MARGIN
    yield "token_embd.weight", embedding
    yield "output.weight", output
    yield "output_norm.weight", np.ones(HIDDEN, np.float32)
    yield "blk.0.attn_norm.weight", np.ones(HIDDEN, np.float32)
    yield "blk.0.ffn_norm.weight", np.ones(HIDDEN, np.float32)
    for name, rows in (("attn_q", HIDDEN), ("attn_k", HEAD), ("attn_v", HEAD), ("attn_output", HIDDEN)):
        yield f"blk.0.{name}.weight", np.zeros((rows, HIDDEN), np.float16)
    for name in ("ffn_gate", "ffn_up", "ffn_down"):
        yield f"blk.0.{name}.weight", np.zeros((HIDDEN, HIDDEN), np.float16)
