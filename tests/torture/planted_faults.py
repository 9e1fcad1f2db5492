"""Plant faults in a copy of the source, one at a time, and check that a quick test fails for each.

    python -m tests.torture.planted_faults [NAME ...]

The program exits with status 1 if a fault is not found, or if the tests fail without any fault.
"""

import sys

from tests.torture.planting import Fault, run

ROUTING = ("tests/engine/models/test_expert_routing.py",)
EXPERTS = "tests/engine/models/test_experts.py"
CONFIGS = ("tests/engine/models/test_family_configs.py",)


def logits(family: str) -> tuple[str, ...]:
    """Return the test that compares a family's logits and choices with transformers."""
    return (f"{EXPERTS}::test_chosen_experts_and_all_logits_equal_transformers[{family}]",)


def stored(source: str) -> tuple[str, ...]:
    """Return the test of the logits of a checkpoint in one spelling, such as "qwen3 moe as gguf"."""
    return (f"tests/engine/models/test_decoder_families.py::test_logits_equal_transformers[{source}]",)


ROUTE, COMPUTE = "engine/kernels/reference.py", "engine/backends/reference.py"
LOAD = "engine/models/mlp_loader.py"
NOT_LOADED = (
    f"{EXPERTS}::test_draft_layers_and_vision_tensors_of_a_gguf_file_are_not_loaded",
    f"{EXPERTS}::test_draft_layers_and_vision_tensors_of_a_folder_are_not_loaded",
)
CHOICE = "choice = scores if choice_bias is None else scores + choice_bias"
SHARED = "out += shared if routes.shared is None else routes.shared * shared"
OUTPUT = "output = _mlp(x[rows], mlp.experts[number], gate, mlp.biases, number)"
SUM = "out[rows] += routes.weights[rows, choices, None] * output"
WEIGHTED = f"{OUTPUT}\n            {SUM}"
EARLY = WEIGHTED.replace("x[rows]", "routes.weights[rows, choices, None] * x[rows]").replace(SUM, "out[rows] += output")

FAULTS: dict[str, Fault] = {
    "weights are never normalized": Fault(ROUTE, "if routing.normalized:", "if False:", ROUTING),
    "weights are always normalized": Fault(ROUTE, "if routing.normalized:", "if True:", ROUTING),
    "the bias is in the weights": Fault(ROUTE, "weights = scores.gather", "weights = choice.gather", ROUTING),
    "the bias is ignored": Fault(ROUTE, CHOICE, "choice = scores", ROUTING),
    "the scale is dropped": Fault(ROUTE, "weights = weights * routing.scale", "pass", ROUTING),
    "groups are ignored": Fault(ROUTE, "if routing.groups > 1:", "if routing.groups > 99:", ROUTING),
    "one group too many": Fault(ROUTE, "routing.active_groups)", "routing.active_groups + 1)", ROUTING),
    "groups are ranked by their best expert": Fault(ROUTE, "topk(min(2, groups.shape[-1]))", "topk(1)", ROUTING),
    "experts of other groups have score 0": Fault(ROUTE, "groups, -torch.inf)", "groups, 0.0)", ROUTING),
    "ties go to the last expert": Fault(
        ROUTE, "return values.sort(", "return (values + 1e-6 * torch.arange(values.shape[-1])).sort(", ROUTING
    ),
    "one expert too many": Fault(
        ROUTE, "_largest(choice, routing.active)", "_largest(choice, routing.active + 1)", ROUTING
    ),
    "experts are not in order": Fault(ROUTE, "routing.active).sort(dim=-1).values", "routing.active)", ROUTING),
    "softmax for sigmoid": Fault(
        ROUTE, "Score.SIGMOID: sigmoid", "Score.SIGMOID: partial(torch.softmax, dim=-1)", ROUTING
    ),
    "the sigmoid depends on the batch": Fault(
        ROUTE, "return 1 / (1 + torch.exp(-x))", "return torch.sigmoid(x)", ROUTING
    ),
    "the last expert is unused": Fault(
        COMPUTE, "set(routes.ids.flatten().tolist())", "set(routes.ids.flatten().tolist()) - {7}", logits("olmoe")
    ),
    "another expert computes": Fault(COMPUTE, "mlp.experts[number]", "mlp.experts[number - 1]", logits("olmoe")),
    "weights are applied before the MLP": Fault(COMPUTE, WEIGHTED, EARLY, logits("olmoe")),
    "the shared MLP is dropped": Fault(COMPUTE, "if mlp.shared:", "if False:", logits("glm moe")),
    "the shared gate is dropped": Fault(COMPUTE, SHARED, "out += shared", logits("qwen2 moe")),
    "the residual stream is dropped": Fault(COMPUTE, "return _added(out, add_to)", "return out", logits("olmoe")),
    "gate and up are swapped": Fault(LOAD, "{gate: width, up: width}", "{up: width, gate: width}", logits("olmoe")),
    "the bias is not loaded": Fault(LOAD, "if choice in self.parts.weights:", "if False:", logits("minimax moe")),
    "another expert of a GGUF tensor": Fault(
        "engine/checkpoints/gguf.py", "Slab(expert, count)", "Slab(count - 1 - expert, count)", stored("olmoe as gguf")
    ),
    "another expert of a stacked tensor": Fault(
        "engine/checkpoints/safetensors.py",
        "self._plain(tensor, Slab(expert, count)",
        "self._plain(tensor, Slab(count - 1 - expert, count)",
        stored("olmoe as fused"),
    ),
    "a stride that is too short": Fault(
        "quant/tensor_file.py", "size * self.index", "size // 2 * self.index", stored("olmoe as gguf")
    ),
    "w1 and w3 are swapped": Fault(
        "engine/models/expert_config.py", '"w1", "w3", "w2"', '"w3", "w1", "w2"', logits("mixtral moe")
    ),
    "a list of widths has any length": Fault(
        "engine/models/expert_config.py",
        "len(values) != layers or ",
        "",
        ("tests/engine/checkpoints/test_broken_experts.py",),
    ),
    "more active experts than experts": Fault(
        "engine/models/expert_config.py",
        "if active > count:",
        "if False:",
        ("tests/engine/checkpoints/test_broken_experts.py",),
    ),
    "one dense layer too many": Fault("engine/models/glm.py", "number >= dense", "number > dense", logits("glm moe")),
    "GLM routes by softmax": Fault(
        "engine/models/glm.py", "score=Score.SIGMOID", "score=Score.SOFTMAX", logits("glm moe")
    ),
    "GLM has no scale": Fault("engine/models/glm.py", 'scale="routed_scaling_factor"', 'scale=""', logits("glm moe")),
    "draft layers are loaded": Fault("engine/models/__init__.py", "range(config.draft_layers)", "range(0)", NOT_LOADED),
    "Ernie rotates halves": Fault(
        "engine/models/ernie.py", "interleaved=True", "interleaved=False", logits("ernie moe")
    ),
    "OLMoE normalizes in GGUF files": Fault(
        "engine/models/olmo.py", "normalized=False", "normalized=True", stored("olmoe as gguf")
    ),
    "Granite has no shared MLP": Fault(
        "engine/models/granite.py",
        'shared_hidden="shared_intermediate_size"',
        'shared_hidden=""',
        logits("granite moe shared"),
    ),
    "a default differs from transformers": Fault("engine/models/ernie.py", '"moe_k": 6', '"moe_k": 8', CONFIGS),
    "all experts are active": Fault(
        "engine/model_config.py",
        "self.routing.active * self.hidden",
        "self.routing.experts * self.hidden",
        ("tests/app/commands/test_fit.py::test_weights_that_a_token_reads_are_shown",),
    ),
}


if __name__ == "__main__":
    sys.exit(run(FAULTS, __doc__))
