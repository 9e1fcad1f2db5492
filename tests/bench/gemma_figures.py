"""Compare Gemma 3 in Inglenook and in llama.cpp with float32: `python -m tests.bench.gemma_figures MODEL.gguf`.

The baseline is transformers in float32, with the file's weights dequantized by the `gguf` package. The reference engine
and xllamacpp run the same file. The text has 768 tokens of the help() topics of Python, prefilled at once, so that the
windows of 512 tokens matter. The report has the mean Kullback-Leibler divergence per token over the last 256 tokens,
and the number of equal tokens in greedy replies. The divergence counts all tokens outside llama.cpp's 100 most likely
ones as one token.
"""

import argparse
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import torch
import xllamacpp
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from app.text.gguf_tokenizer import from_gguf
from engine import models
from engine.backends.reference import ReferenceDevice
from engine.batch import build_batch
from engine.checkpoints.weights import Weights
from engine.config import EngineConfig, GroupConfig
from engine.device import Compute
from engine.kv.budget import group_config
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from tests.engine.models.family_checkpoints import architecture
from tests.support.gguf_reader import Reader
from tests.support.held_request import HeldRequest

TOKENS, MEASURED, REPLY, TOP = 768, 256, 48, 100
BOS = 2  # Gemma needs it for meaningful output
BLOCKS = 1 + TOKENS // 16
PROMPTS = ("The three largest cities of Italy are", "def fibonacci(n):\n", "Once upon a time, a fox")


def transformers_model(path: Path) -> Gemma3ForCausalLM:
    """Return a transformers model with the file's weights as float32."""
    reader = Reader(path)
    values = {tensor.name: tensor for tensor in reader.tensors}
    config = Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=32768,
        query_pre_attn_scalar=256,
    )
    names = gguf.get_tensor_name_map(architecture("gemma3"), 18)
    model: Gemma3ForCausalLM = Gemma3ForCausalLM(config).train(mode=False)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            tensor = values[str(names.get_name(name, try_suffixes=(".weight",)))]
            stored = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            parameter.copy_(stored - 1 if name.endswith("norm.weight") else stored)
    return model


class Peer:
    """A peer: llama.cpp with the file loaded."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(path), 2 * TOKENS, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
        self._server = xllamacpp.Server(params)

    def complete(self, ids: Sequence[int], tokens: int, top: int) -> list[dict[str, Any]]:
        body = {"prompt": list(ids), "max_tokens": tokens, "temperature": 0, "n_probs": top, "cache_prompt": True}
        found: list[dict[str, Any]] = self._server.handle_completions(body)["choices"][0]["logprobs"]["content"]
        return found

    def likely(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the ids of the most likely next tokens, most likely first, and their log-probabilities."""
        candidates = self.complete(ids, 1, TOP)[0]["top_logprobs"]
        return torch.tensor([it["id"] for it in candidates]), torch.tensor([it["logprob"] for it in candidates])


def load_reference_engine(path: Path) -> tuple[Compute, tuple[GroupConfig, ...]]:
    device = ReferenceDevice(keep_dequantized=True, threads=2)
    with open_checkpoint(path) as checkpoint:
        model = models.read_config(checkpoint.metadata)
        groups = tuple(group_config(cache) for cache in model.caches)
        config = EngineConfig("reference", TOKENS, BLOCKS, groups=groups)
        weights = Weights(path, models.stored_weights(checkpoint))
        return device.load(model, weights, config).compute, groups


def reference_engine_logits(path: Path, ids: Sequence[int]) -> Tensor:
    """Return the logits of the last tokens, float32 [MEASURED, vocabulary size]."""
    compute, groups = load_reference_engine(path)
    it = HeldRequest(1, tuple(ids), SamplingParams(), block_tables=tuple(list(range(1, BLOCKS)) for _ in groups))
    plan = StepPlan((it.part(0, len(ids)),))
    batch = build_batch(plan, vocab_size=262_144, num_blocks=BLOCKS, groups=groups)
    return compute(replace(batch, logit_rows=range(len(ids) - MEASURED, len(ids)))).values


def reference_engine_replies(path: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    with open_checkpoint(path) as checkpoint:
        engine = load_engine(checkpoint, LoadOptions("reference", 512, threads=2))
    params = SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True, drafts=False)
    requests = [engine.request(tuple(ids), params, frozenset()) for ids in prompts]
    for it in requests:
        engine.add(it)
    while engine.has_work:
        engine.step()
    return [it.output_ids for it in requests]


def lumped(row: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities of `ids`, followed by the log-probability of all other tokens together."""
    chosen = row.double().log_softmax(-1)[ids]
    return torch.cat([chosen, torch.log1p(-chosen.exp().sum()).unsqueeze(0)])


def divergences(exact_logits: Tensor, found: Tensor, peer: Peer, ids: Sequence[int]) -> tuple[float, float]:
    """Return the mean divergence from `exact_logits` in nats per token, for `found` and for the peer."""
    sums = torch.zeros(2, dtype=torch.float64)
    for index, (theirs, row) in enumerate(zip(exact_logits, found, strict=True)):
        likely, logprobs = peer.likely(ids[: TOKENS - MEASURED + index + 1])
        p = lumped(theirs, likely)
        for number, q in enumerate((lumped(row, likely), lumped_peer(logprobs.double()))):
            sums[number] += (p.exp() * (p - q)).sum()
    return float(sums[0]) / MEASURED, float(sums[1]) / MEASURED


def lumped_peer(logprobs: Tensor) -> Tensor:
    return torch.cat([logprobs, torch.log1p(-logprobs.exp().sum().clamp(max=1 - 1e-7)).unsqueeze(0)])


def greedy(model: Gemma3ForCausalLM, prompt: Sequence[int]) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(REPLY):
            ids.append(int(model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=True)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), len(first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    path: Path = parser.parse_args().model
    with open_checkpoint(path) as checkpoint:
        tokenizer = from_gguf(checkpoint.metadata.values)
    text = "\n\n".join(pydoc_data.topics.topics.values())
    ids = [BOS, *tokenizer.encode(text[: 8 * TOKENS])][:TOKENS]
    reference, peer = transformers_model(path), Peer(path)
    with torch.inference_mode():
        exact_logits = reference(torch.tensor([ids]), logits_to_keep=MEASURED).logits[0]
    found = reference_engine_logits(path, ids)
    print(
        f"largest difference of Inglenook's logits from float32: {(exact_logits - found).abs().max():.2g}", flush=True
    )
    mine, theirs = divergences(exact_logits, found, peer, ids)
    print(f"divergence per token: Inglenook {mine:.2g}, llama.cpp {theirs:.2g}", flush=True)
    prompts = [[BOS, *tokenizer.encode(prompt)] for prompt in PROMPTS]
    for prompt, reply in zip(prompts, reference_engine_replies(path, prompts), strict=True):
        exact = greedy(reference, prompt)
        other = [it["id"] for it in peer.complete(prompt, REPLY, 1)]
        print(
            f"{REPLY} greedy tokens, the first n equal to float32: Inglenook {common(exact, reply)}, llama.cpp "
            f"{common(exact[: len(other)], other)} of {len(other)}; {tokenizer.decode(reply)!r}",
            flush=True,
        )


if __name__ == "__main__":
    main()
