"""LoRA and DoRA adapters: the layers that a target matches, and the number of added parameters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator

from megaboa.check.facts import Facts, Model
from megaboa.check.rule import Broken
from megaboa.check.stages import Stage

KEY = "tuning.targets"
ATTENTION = ("linear_qkv", "linear_proj")
LATENT = (
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"),
)
FEED_FORWARD = ("linear_fc1", "linear_fc2")
# Names used by the library peft, and by Hugging Face's models.
OF_PEFT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "linear_qkv"),
    "o_proj": "linear_proj",
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "linear_fc1"),
    "down_proj": "linear_fc2",
}


def matches(target: str, path: str) -> bool:
    """Whether a target matches a layer, as in Bridge's ModuleMatcher: by its own name, or its whole path, with `*` as
    wildcard."""
    return target == path.rpartition(".")[2] or re.fullmatch(target.replace("*", "(.*)"), path) is not None


def of_model(f: Facts) -> float:
    """Parameters of all adapters, counted once."""
    layers = tuple(range(f.model.layers or 0))
    whole = Stage(0, (layers,), embedding=True, loss=True, mtp=f.model.mtp_layers)
    return of_stage(Facts(model=f.model, training=f.training), whole)


def of_stage(f: Facts, stage: Stage) -> float:
    """Parameters of adapters on one rank of a stage: a wide and a narrow matrix for every adapted layer."""
    rank, magnitudes = f.training.adapter_rank or 0, f.training.adapter_magnitudes
    sizes = [
        rank * (inputs + outputs) + magnitudes * outputs
        for block in (*_decoder(stage.layers), *(f"mtp.layers.{number}.mtp_model_layer" for number in range(stage.mtp)))
        for path, inputs, outputs in _layers(f.model, block)
        if _is_chosen(f.training.adapter_targets, path)
    ]
    return sum(sizes) / f.layout.tp


def _is_chosen(targets: Iterable[str], path: str) -> bool:
    return any(matches(target, path) for target in targets)


def _decoder(layers: Iterable[int]) -> list[str]:
    return [f"decoder.layers.{number}" for number in layers]


def _layers(model: Model, block: str) -> Iterator[tuple[str, int, int]]:
    """Places for adapters in a layer of the model: paths, inputs and outputs."""
    for name, (inputs, outputs) in _attention(model).items():
        yield f"{block}.self_attention.{name}", inputs, outputs
    hidden, ffn = model.hidden or 0, model.ffn or 0
    yield f"{block}.mlp.linear_fc1", hidden, ffn * (2 if model.gated else 1)
    yield f"{block}.mlp.linear_fc2", ffn, hidden


def _attention(model: Model) -> dict[str, tuple[int, int]]:
    hidden, heads = model.hidden or 0, model.heads or 0
    if not model.latent:
        head = model.head_dim or 0
        return {
            "linear_qkv": (hidden, (heads + 2 * (model.kv_groups or heads)) * head),
            "linear_proj": (heads * head, hidden),
        }
    no_position, position, value = model.qk_head_dim or 0, model.qk_position_dim or 0, model.v_head_dim or 0
    kv_rank, query = model.kv_rank or 0, heads * (no_position + position)
    found = {
        "linear_kv_down_proj": (hidden, kv_rank + position),
        "linear_kv_up_proj": (kv_rank, heads * (no_position + value)),
        "linear_proj": (heads * value, hidden),
    }
    if model.q_rank is None:
        return {"linear_q_proj": (hidden, query), **found}
    return {"linear_q_down_proj": (hidden, model.q_rank), "linear_q_up_proj": (model.q_rank, query), **found}


def adapters_leave_experts_alone(f: Facts) -> Broken | None:
    """Adapters are for attention in a model with experts: Bridge gives the experts of a rank one adapter, so that every
    layout would train another model."""
    if not f.model.is_sparse or not (beyond := [one for one in f.training.adapter_targets if _ends(one, FEED_FORWARD)]):
        return None
    text = f"{', '.join(beyond)} would give adapters to experts too, which every layout shares out otherwise"
    return Broken(KEY, text, (_listed(_attention(f.model)),))


def targets_name_layers(f: Facts) -> Broken | None:
    """Every target names layers of the model, by Megatron's names: Bridge only warns of one that matches none
    (module_matcher.py), and trains fewer adapters, or nothing."""
    model = f.model
    known = model.layers is not None and bool(model.heads)
    attention = tuple(_attention(model)) if known else tuple(dict.fromkeys((*ATTENTION, *LATENT)))
    legal = (*attention, *FEED_FORWARD)
    for target in f.training.adapter_targets:
        if not _ends(target, legal):
            name = target.rpartition(".")[2].strip("*")
            named = OF_PEFT.get(name)
            near = [named] if named in legal else difflib.get_close_matches(name, legal, n=2)
            text = f"{target!r} ends with the name of no layer that this model has: they are {', '.join(legal)}"
            return Broken(KEY, text, tuple(near))
        paths = [path for block in _decoder(range(model.layers or 0)) for path, _, _ in _layers(model, block)]
        if known and not any(matches(target, path) for path in paths):
            text = f"{target!r} matches none of the model's layers, as {paths[0]} to {paths[-1]}"
            return Broken(KEY, text, tuple(name for name in legal if target.endswith(name)))
    return None


def numbered_targets_are_of_one_stage(f: Facts) -> Broken | None:
    """Targets with numbers of layers are for pp 1: Bridge compares them with the numbers that layers have on their own
    stage, so that every stage would get adapters, and another layout would train another model."""
    numbered = [target for target in f.training.adapter_targets if re.search(r"\d", target.rpartition(".")[0])]
    if f.layout.pp == 1 or not numbered:
        return None
    text = f"{numbered[0]!r} would be counted by each of pp = {f.layout.pp} stages on its own: set parallel.pp to 1, or"
    return Broken(KEY, f"{text} name layers without numbers", (numbered[0].rpartition(".")[2],))


def magnitudes_are_of_whole_layers(f: Facts) -> Broken | None:
    """DoRA is for tp 1: where a layer's inputs are divided, Bridge 0.6.2 takes the norm of one rank's part and
    saves it as the whole layer's; magnitudes of other layers count on one rank alone when gradients are clipped."""
    if not f.training.adapter_magnitudes or f.layout.tp == 1:
        return None
    text = f"task: dora with tp = {f.layout.tp} would train and export another model than with tp = 1"
    return Broken("parallel.tp", f"{text}. Divide by pp, dp or cp, or take task: lora", (1,))


def _ends(target: str, names: Iterable[str]) -> bool:
    return target.endswith(tuple(names))


def _listed(names: Iterable[str]) -> str:
    return f"[{', '.join(names)}]"


RULES = (
    adapters_leave_experts_alone,
    targets_name_layers,
    numbered_targets_are_of_one_stage,
    magnitudes_are_of_whole_layers,
)
