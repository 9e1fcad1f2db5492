"""Read the mixture of experts of a checkpoint into an ExpertConfig.

GGUF files of all families have the same keys, and families differ in the keys of their config.json. Unsupported values
raise UnsupportedModel, which names the key.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gguf.constants import Keys

from engine.checkpoints.metadata import Key, Metadata
from engine.errors import UnsupportedModel
from engine.model_config import ExpertConfig, ModelConfig, Routing, Score
from engine.models.decoder_config import EXPERT_COUNTS, LAYERS

MAX_EXPERTS = 1024
# expert_gating_func in GGUF files; 0: the default of the family; 3: the softmax of the chosen logits, which is the
# softmax of all logits with normalized weights
SCORES = {1: Score.SOFTMAX, 2: Score.SIGMOID, 3: Score.SOFTMAX}
CHOSEN_SOFTMAX = 3
GATING = Key(Keys.LLM.EXPERT_GATING_FUNC, "")


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The names of a family's keys in a config.json. An empty name means that its files do not have the key."""

    active: str = "num_experts_per_tok"
    hidden: str = "intermediate_size"
    normalized: str = ""
    shared_count: str = ""
    shared_hidden: str = ""
    scale: str = ""
    groups: str = ""
    active_groups: str = ""


def read_experts(
    metadata: Metadata, config: ModelConfig, keys: ExpertKeys, *, score: Score = Score.SOFTMAX, normalized: bool = True
) -> ExpertConfig:
    """Return the experts of a layer. `score` and `normalized` are the defaults of the family."""
    count_key = next((key for key in EXPERT_COUNTS if metadata.get(key) is not None), EXPERT_COUNTS[0])
    count = metadata.integer(count_key, maximum=MAX_EXPERTS)
    active_key = Key(Keys.LLM.EXPERT_USED_COUNT, keys.active)
    active = _of_all_layers(metadata, active_key).integer(active_key, maximum=MAX_EXPERTS)
    if active > count:
        raise UnsupportedModel(f"{metadata.name(active_key)} is {active}, but the model has {count} experts")
    gating = metadata.integer(GATING, 0, minimum=0, maximum=8)
    if gating and gating not in SCORES:
        raise UnsupportedModel(f"{metadata.name(GATING)} = {gating} is not supported by this version")
    hidden_key = Key(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, keys.hidden)
    hidden = _of_all_layers(metadata, hidden_key).integer(hidden_key, *config.mlp_widths)
    routing = Routing(
        count,
        active,
        SCORES.get(gating, score),
        gating == CHOSEN_SOFTMAX or metadata.flag(Key(Keys.LLM.EXPERT_WEIGHTS_NORM, keys.normalized), normalized),
        scale=metadata.number(Key(Keys.LLM.EXPERT_WEIGHTS_SCALE, keys.scale), 1.0, minimum=0.0, maximum=1e3) or 1.0,
        **_groups(metadata, keys, count),
    )
    return ExpertConfig(routing, hidden, _shared_hidden(metadata, keys, hidden))


def _of_all_layers(metadata: Metadata, key: Key) -> Metadata:
    """Return metadata in which a list with a value per layer is that value.

    Raises UnsupportedModel if the list has the wrong length, or if layers differ. Dense layers have the value 0.
    """
    values = metadata.get(key)
    if not isinstance(values, tuple):
        return metadata
    layers, different = metadata.integer(LAYERS), set(values) - {0}
    if len(values) != layers or len(different) > 1:
        raise UnsupportedModel(
            f"{metadata.name(key)} has {len(values)} values, of which {len(different)} differ, for {layers} layers",
            "It must have one value, or the same for each layer.",
        )
    return replace(metadata, values={**metadata.values, metadata.name(key): next(iter(different), 0)})


def _groups(metadata: Metadata, keys: ExpertKeys, count: int) -> dict[str, int]:
    key, active_key = (
        Key(Keys.LLM.EXPERT_GROUP_COUNT, keys.groups),
        Key(Keys.LLM.EXPERT_GROUP_USED_COUNT, keys.active_groups),
    )
    groups = metadata.integer(key, 1, maximum=count)
    active = metadata.integer(active_key, groups, maximum=count)
    if count % groups or active > groups:
        raise UnsupportedModel(
            f"{metadata.name(key)} = {groups} and {metadata.name(active_key)} = {active} do not divide {count} experts"
        )
    return {"groups": groups, "active_groups": active}


def _shared_hidden(metadata: Metadata, keys: ExpertKeys, hidden: int) -> int:
    """Return the width of the shared MLP: its own key, or the number of shared experts times the width of an expert."""
    width = metadata.integer(Key(Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, keys.shared_hidden), 0, minimum=0)
    return width or hidden * metadata.integer(Key(Keys.LLM.EXPERT_SHARED_COUNT, keys.shared_count), 0, minimum=0)


def with_experts(config: ModelConfig, experts: ExpertConfig, layers: Sequence[bool] | None = None) -> ModelConfig:
    """Return the configuration with experts in the layers that `layers` marks; None: in all layers."""
    marks = [True] * len(config.layers) if layers is None else layers
    marked = zip(config.layers, marks, strict=True)
    return replace(config, layers=tuple(replace(it, mlp=experts) if has_experts else it for it, has_experts in marked))


# -- names of weights in transformers (see `Names`)

_MLP, _SPARSE = "model.layers.{}.mlp.", "model.layers.{}.block_sparse_moe."


def _expert_stems(experts: str, gate: str, up: str, down: str) -> dict[str, str]:
    return {
        "blk.{}.ffn_gate.{e}": f"{experts}.{gate}",
        "blk.{}.ffn_up.{e}": f"{experts}.{up}",
        "blk.{}.ffn_down.{e}": f"{experts}.{down}",
    }


EXPERT_STEMS = {"blk.{}.ffn_gate_inp": f"{_MLP}gate"} | _expert_stems(
    f"{_MLP}experts.{{e}}", "gate_proj", "up_proj", "down_proj"
)
MIXTRAL_STEMS = {"blk.{}.ffn_gate_inp": f"{_SPARSE}gate"} | _expert_stems(f"{_SPARSE}experts.{{e}}", "w1", "w3", "w2")
SHARED_STEMS = {f"blk.{{}}.ffn_{name}_shexp": f"{_MLP}shared_experts.{name}_proj" for name in ("gate", "up", "down")}
# one tensor for all experts of a layer
STACKED = {
    f"{_MLP}experts.gate_up_proj": "blk.{}.ffn_gate_up.{e}.weight",
    f"{_MLP}experts.down_proj": "blk.{}.ffn_down.{e}.weight",
}
