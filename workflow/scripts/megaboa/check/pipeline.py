"""Division of layers over pipeline stages, and the flow of micro-batches through them."""

from __future__ import annotations

from megaboa.check.facts import Facts
from megaboa.check.rule import Broken, divisors, multiples, warning

DEEPSEEK_V3_LAYERS = 61
DEEPSEEK_V3_PAIRS = ((1, 1), (4, 1), (8, 1), (4, 2), (16, 1), (8, 2), (4, 4))


def interleaving_needs_a_pipeline(f: Facts) -> Broken | None:
    """Virtual stages take turns on several ranks: parallel_state.py refuses vpp where pp is 1."""
    if f.layout.chunks == 1 or f.layout.pp > 1:
        return None
    return Broken("parallel.vpp", f"{f.layout.vpp} needs parallel.pp above 1", (1,))


def layers_fill_the_stages(f: Facts) -> Broken | None:
    """Layers (plus embedding and loss, if counted as one layer each) are a multiple of pp * vpp;
    transformer_block.py asserts it when the model is built."""
    layout, layers = f.layout, f.model.layers
    uneven = layout.first_stage_layers or layout.last_stage_layers
    if layers is None or layout.pp == 1 or layout.stages is not None or uneven:
        return None
    total, stages = layers + layout.embedding_counts + layout.loss_counts, layout.pp * layout.chunks
    if total % stages == 0 and total >= stages:
        return None
    extra = [word for word, counts in (("embedding", layout.embedding_counts), ("loss", layout.loss_counts)) if counts]
    what = " and ".join([f"{layers} layers", *extra])
    key = "parallel.vpp" if total % layout.pp == 0 else "parallel.pp"
    legal = divisors(total // layout.pp, layout.chunks) if key == "parallel.vpp" else divisors(total, layout.pp)
    text = f"{what} can't be divided over pp * vpp = {layout.pp} * {layout.chunks} stages"
    return Broken(key, f"{text} without model.pipeline_model_parallel_layout", legal)


def uneven_stages_leave_even_ones(f: Facts) -> Broken | None:
    """The layers outside the first and last stage are divided evenly over the stages between them, and every stage over
    its virtual ones; transformer_config.py refuses anything else. transformer_layer.py divides interleaved ends without
    a stage between them by zero.
    """
    layout, layers = f.layout, f.model.layers
    ends = [n for n in (layout.first_stage_layers, layout.last_stage_layers) if n is not None]
    if layers is None or not ends or layout.stages is not None:
        return None
    key = (
        "model.num_layers_in_first_pipeline_stage"
        if layout.first_stage_layers
        else "model.num_layers_in_last_pipeline_stage"
    )
    rest, between = layers - sum(ends), layout.pp - len(ends)
    if any(n < 1 or n % layout.chunks for n in ends):
        return Broken(key, f"the ends have {ends} layers, which must be multiples of vpp = {layout.chunks}")
    if between < 0 or rest < 0 or bool(rest) != bool(between):
        return Broken(key, f"{rest} layers are left for {max(between, 0)} stages")
    if not between and layout.chunks > 1:
        return Broken(key, f"no stage is left between the ends, with parallel.vpp: {layout.chunks}: set one end only")
    if between and rest % (between * layout.chunks):
        text = f"{rest} layers are left, not a multiple of {between} stages * vpp = {between * layout.chunks}"
        near = [layers - (len(ends) - 1) * ends[-1] - n for n in multiples(rest, between * layout.chunks)]
        return Broken(key, text, tuple(n for n in near if n > 0))
    return None


def layers_are_shared_out_in_one_way(f: Facts) -> Broken | None:
    """A pipeline layout, uneven ends, and counting embedding or loss exclude each other; transformer_config.py
    refuses two."""
    layout = f.layout
    ways = (
        {"model.pipeline_model_parallel_layout": layout.stages is not None},
        {
            "model.num_layers_in_first_pipeline_stage": layout.first_stage_layers,
            "model.num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        },
        {
            "model.account_for_embedding_in_pipeline_split": layout.embedding_counts,
            "model.account_for_loss_in_pipeline_split": layout.loss_counts,
        },
    )
    used = [next(field for field in way if way[field]) for way in ways if any(way.values())]
    return Broken(used[0], f"is set together with {', '.join(used[1:])}: keep one") if len(used) > 1 else None


def pipeline_layout_holds_the_model(f: Facts) -> Broken | None:
    """A pipeline layout has pp * vpp stages, every layer once, the embedding first and the loss last;
    pipeline_parallel_layer_layout.py refuses anything else."""
    layout, key = f.layout, "model.pipeline_model_parallel_layout"
    if layout.stages is None:
        return None
    stages = layout.stages
    if len(stages) % layout.pp or (layout.vpp and len(stages) != layout.pp * layout.vpp):
        wanted = (layout.pp * layout.vpp,) if layout.vpp else multiples(len(stages), layout.pp)
        return Broken(key, f"has {len(stages)} stages, and pp * vpp is {layout.pp} * {layout.chunks}", wanted)
    parts = [part for stage in stages for part in stage]
    if f.model.layers is not None and parts.count("decoder") != f.model.layers:
        return Broken(
            key, f"has {parts.count('decoder')} decoder layers, the model {f.model.layers}", (f.model.layers,)
        )
    if parts.count("embedding") != 1 or "embedding" not in stages[0]:
        return Broken(key, "must have one embedding, in the first stage")
    if parts.count("loss") != 1 or "loss" not in stages[-1]:
        return Broken(key, "must have one loss, in the last stage")
    if parts.count("mtp") != f.model.mtp_layers:
        return Broken(
            key, f"has {parts.count('mtp')} MTP layers, the model {f.model.mtp_layers}", (f.model.mtp_layers,)
        )
    return None


def deepseek_v3_has_a_layout(f: Facts) -> Broken | None:
    """DeepSeek-V3's 61 layers fit no even pipeline: Bridge has layouts for (pp, vpp) of (1, 1), (4, 1), (8, 1), (4,
    2), (16, 1), (8, 2) and (4, 4), and none for other pairs; other pairs need one that is set, or uneven ends."""
    layout, model = f.layout, f.model
    known = model.family == "deepseek_v3" and model.layers == DEEPSEEK_V3_LAYERS
    divided = (layout.stages, layout.first_stage_layers, layout.last_stage_layers)
    counted = layout.embedding_counts or layout.loss_counts
    if not known or counted or any(divided) or (layout.pp, layout.chunks) in DEEPSEEK_V3_PAIRS:
        return None
    near = sorted(DEEPSEEK_V3_PAIRS, key=lambda pair: abs(pair[0] * pair[1] - layout.pp * layout.chunks))[:3]
    return Broken(
        "parallel.pp", f"(pp, vpp) = ({layout.pp}, {layout.chunks}) has no layout for DeepSeek-V3", tuple(near)
    )


def interleaved_stages_have_micro_batches(f: Facts) -> Broken | None:
    """Interleaved stages take groups of micro-batches, of pp unless told otherwise: a group has at least pp, a step has
    at least one group, and the remainder is 0 or at least pp; schedules.py refuses anything else in the first step.
    """
    count, pp = f.microbatches, f.layout.pp
    group = pp if f.layout.group is None else f.layout.group
    if f.layout.chunks == 1 or pp == 1:
        return None
    if group < pp:
        return Broken("model.microbatch_group_size_per_vp_stage", f"{group} is less than parallel.pp: {pp}", (pp,))
    if count is None or (count >= group and not 0 < count % group < pp):
        return None
    unit = (f.layout.dp or 1) * (f.training.mbs or 1)
    legal = tuple(n * unit for n in multiples(count, group))
    text = f"{f.training.gbs} makes {count} micro-batches, not a multiple of {group}, which vpp = {f.layout.vpp} needs"
    return Broken("training.global_batch_size", text, legal)


def micro_batches_fill_the_pipeline(f: Facts) -> Broken | None:
    """A pipeline with fewer micro-batches than stages is never full: stages wait for most of the step."""
    count, pp = f.microbatches, f.layout.pp
    if count is None or count >= pp:
        return None
    unit = (f.layout.dp or 1) * (f.training.mbs or 1)
    text = (
        f"{f.training.gbs} makes {count} micro-batches for {pp} stages: each waits {pp - 1} of {count + pp - 1} turns"
    )
    return warning("training.global_batch_size", text, (pp * unit,))


def pipeline_has_a_type(f: Facts) -> Broken | None:
    """Stages must know the dtype of the tensors they receive: model_parallel_config.py refuses pp above 1 without
    pipeline_dtype."""
    if f.layout.pp == 1 or f.training.pipeline_dtype:
        return None
    return Broken(
        "model.pipeline_dtype", "is null with parallel.pp above 1: set training.precision", ("bf16_mixed", "fp32")
    )


RULES = (
    interleaving_needs_a_pipeline,
    layers_fill_the_stages,
    uneven_stages_leave_even_ones,
    layers_are_shared_out_in_one_way,
    pipeline_layout_holds_the_model,
    deepseek_v3_has_a_layout,
    interleaved_stages_have_micro_batches,
    micro_batches_fill_the_pipeline,
    pipeline_has_a_type,
)
