"""The cuts of tensor, sequence and context parallelism, and low precision's requirements for the pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megaboa.check.facts import Facts
from megaboa.check.rule import Broken, divisors, multiples, warning

# Transformer Engine's quantized matrix products require both dimensions to be multiples of these.
ALIGNMENT = {
    "bf16_with_fp8_delayed_scaling_mixed": 16,
    "bf16_with_fp8_current_scaling_mixed": 16,
    "bf16_with_fp8_subchannel_scaling_mixed": 16,
    "bf16_with_mxfp8_mixed": 32,
    "bf16_with_nvfp4_mixed": 32,
}

EXCHANGES = ("p2p", "all_gather", "a2a", "a2a+p2p")  # of context ranks: cp_comm_type

# Families of which transformers refuses a config whose heads don't divide the hidden size, even with a head_dim.
OF_WHOLE_HEADS = frozenset(("deepseek_v2", "gemma2", "gemma3_text", "llama"))


def sizes_are_set(f: Facts) -> Broken | None:
    """A model has layers, a hidden size and heads; a recipe may leave them open (vanilla_gpt_pretrain_config), and
    Megatron would divide by zero."""
    sizes = {"num_layers": f.model.layers, "hidden_size": f.model.hidden, "num_attention_heads": f.model.heads}
    still_open = [f"model.{name}" for name, value in sizes.items() if value == 0]
    if not still_open:
        return None
    return Broken(still_open[0], f"0: the model's sizes are open: set {' and '.join(still_open)} by overrides")


def heads_divide_the_hidden_size(f: Facts) -> Broken | None:
    """The attention heads divide the hidden size, in families whose config transformers refuses otherwise."""
    hidden, heads = f.model.hidden, f.model.heads
    if f.model.family not in OF_WHOLE_HEADS or not hidden or not heads or hidden % heads == 0:
        return None
    return Broken("model.hidden_size", f"{heads} attention heads don't divide {hidden}", multiples(hidden, heads))


def heads_divide(f: Facts) -> Broken | None:
    """Every tensor rank has the same number of attention heads; transformer_config.py refuses anything else."""
    heads, tp = f.model.heads, f.layout.tp
    if heads is None or heads % tp == 0:
        return None
    return Broken("parallel.tp", f"{tp} doesn't divide {heads} attention heads", divisors(heads, tp))


def key_value_groups_divide(f: Facts) -> Broken | None:
    """Query groups are divided over tensor ranks, or tensor ranks over groups; transformer_config.py refuses
    anything else."""
    groups, tp = f.model.kv_groups, f.layout.tp
    if groups is None or groups == f.model.heads or groups % tp == 0 or tp % groups == 0:
        return None
    legal = [d for d in range(1, (f.model.heads or groups) + 1) if groups % d == 0 or d % groups == 0]
    near = [d for d in legal if d < tp][-1:] + [d for d in legal if d > tp][:1]
    return Broken("parallel.tp", f"{tp} is neither divisor nor multiple of {groups} key-value heads", tuple(near))


def feed_forward_divides(f: Facts) -> Broken | None:
    """The feed-forward width is cut into tp pieces; core/utils.py asserts that nothing is left over."""
    ffn, tp = f.model.ffn, f.layout.tp
    if ffn is None or ffn % tp == 0:
        return None
    return Broken(
        "parallel.tp", f"{tp} doesn't divide the feed-forward width {ffn}", divisors(ffn, tp, f.model.heads or 0)
    )


def vocabulary_divides(f: Facts) -> Broken | None:
    """The vocabulary's rows are cut into tp pieces: Bridge pads them if only the tokenizer's size is known, else they
    must be a multiple.
    """
    rows, tp = f.model.vocab_rows, f.layout.tp
    if rows is None or rows % tp == 0:
        return None
    return Broken("model.vocab_size", f"{rows} rows can't be divided over tp = {tp}", multiples(rows, tp))


def sequence_parallelism_needs_tensor_parallelism(f: Facts) -> Broken | None:
    """Sequence parallelism splits activations over tensor ranks: megatron-core refuses it for one rank, and Bridge
    0.6.2 silently turns it off there.
    """
    if not f.layout.sp or f.layout.tp > 1:
        return None
    return warning("parallel.sp", "true does nothing with parallel.tp: 1", (False,))


def sequence_divides_over_context(f: Facts) -> Broken | None:
    """Every context rank gets two pieces of the sequence, one early and one late, for balance;
    ConfigContainer.validate asserts a multiple of 2 * cp."""
    seq, cp = f.training.seq_length, f.layout.cp
    if seq is None or cp == 1 or seq % (2 * cp) == 0:
        return None
    return Broken("training.seq_length", f"{seq} is not a multiple of 2 * cp = {2 * cp}", multiples(seq, 2 * cp))


def sequence_divides_over_tensor_ranks(f: Facts) -> Broken | None:
    """Under sequence parallelism a rank's part of the sequence (seq_length / cp) is cut into tp pieces; the first
    scatter asserts it, at run time.
    """
    seq, layout = f.training.seq_length, f.layout
    unit = layout.cp * layout.tp
    if seq is None or not layout.sp or seq % layout.cp or seq % unit == 0:
        return None
    return Broken("training.seq_length", f"{seq} is not a multiple of cp * tp = {unit}", multiples(seq, unit))


def sequence_fits_the_positions(f: Facts) -> Broken | None:
    """A sequence is at most as long as the model's max_position_embeddings: beyond it a checkpoint with learned
    positions doesn't load, and rotary positions extrapolate, which must be intended."""
    seq, longest = f.training.seq_length, f.model.max_length
    if seq is None or longest is None or seq <= longest:
        return None
    text = f"{seq} is longer than the model's max_position_embeddings, {longest}"
    if f.model.learned_positions and f.model.pretrained:
        return Broken("training.seq_length", f"{text}, and its positions are learned", (longest,))
    return warning("training.seq_length", text, (longest,))


def sequence_keeps_its_positions(f: Facts) -> Broken | None:
    """A model whose rope_type is dynamic trains on sequences of at most max_position_embeddings: transformers stretches
    the rotary positions of longer ones, which Megatron doesn't, so the export would be another model."""
    seq, longest = f.training.seq_length, f.model.longest_plain
    if seq is None or longest is None or seq <= longest:
        return None
    text = f"transformers stretches the positions of sequences longer than {longest} (rope_type: dynamic)"
    return Broken("training.seq_length", f"{seq}: {text}, and Megatron doesn't", (longest,))


def rotary_positions_turn_pairs(f: Facts) -> Broken | None:
    """Rotary positions turn the numbers of a head in pairs, and a head has room for the last pair: megatron-core rounds
    an odd part up, and the first step fails if that exceeds the head."""
    model = f.model
    field, head = ("qk_pos_emb_head_dim", model.qk_position_dim) if model.latent else ("kv_channels", model.head_dim)
    if head is None or model.rotary is None:
        return None
    turned = int(head * model.rotary) if model.rotary < 1 else head
    if turned + turned % 2 <= head:
        return None
    text = f"rotary positions turn a head's numbers in pairs, and {head} is odd"
    return Broken(f"model.{field}", text, multiples(head, 2))


def context_ranks_exchange_in_a_known_way(f: Facts) -> Broken | None:
    """Context ranks exchange by p2p, all_gather, a2a or a2a+p2p, and a2a divides the attention heads that tensor
    parallelism leaves, and the key-value heads, over them; Transformer Engine's context_parallel.py asserts both in the
    first step, on the GPU only. A list has one for each layer, as transformer_config.py asserts."""
    layout, key = f.layout, "model.cp_comm_type"
    if layout.cp == 1 or layout.cp_comm is None:
        return None
    count, layers = len(layout.exchanges), f.model.layers
    if isinstance(layout.cp_comm, tuple) and layers not in (None, count):
        return Broken(key, f"a list of {count} for {layers} layers: name one for each layer, or a single one, no list")
    if f.cluster.device != "cuda":
        return None
    asked = set(layout.exchanges)
    if unknown := sorted(asked - set(EXCHANGES)):
        return Broken(key, f"there is no {', '.join(unknown)}", EXCHANGES)
    heads = f.model.heads
    if "a2a" not in asked or heads is None or heads % layout.tp:
        return None
    groups = heads if f.model.latent else f.model.kv_groups or heads
    left = {"attention heads": heads // layout.tp, "key-value heads": max(groups // layout.tp, 1)}
    for what, count in left.items():
        if count % layout.cp:
            text = f"a2a can't divide a tensor rank's {count} {what} over parallel.cp: {layout.cp}"
            return Broken(key, text, ("p2p", "all_gather"))
    return None


def masks_of_documents_have_no_context_parallelism(f: Facts) -> Broken | None:
    """No attention kernel takes a mask that blocks attention between documents together with context parallelism."""
    if not f.training.document_mask or f.layout.cp == 1:
        return None
    text = (
        f"true, whose mask no attention kernel takes with context parallelism: set parallel.cp to 1, not {f.layout.cp}"
    )
    return Broken("data.reset_attention_mask", text, ("false",))


def heads_learn_within_examples(f: Facts) -> Broken | None:
    """Heads for multi-token prediction learn packed examples without context parallelism alone: core's
    multi_token_prediction.py shifts labels by the examples' ends before they were padded, as Bridge gives them with cp,
    so that heads would learn other tokens than the next ones."""
    heads, cp = f.model.mtp_layers, f.layout.cp
    if not f.training.packed or not heads or cp == 1:
        return None
    text = f"true with heads for multi-token prediction (model.mtp_num_layers: {heads}), which would learn labels of "
    text += f"wrong positions under parallel.cp: {cp}: set parallel.cp to 1, or model.mtp_num_layers to null"
    key = "dataset.enable_offline_packing" if f.training.task == "pretrain" else "tuning.pack"  # of a recipe, or ours
    return Broken(key, text, ("false",))


def low_precision_is_aligned(f: Facts) -> Broken | None:
    """In a quantized matrix product the width is a multiple of 16 and the tokens of 8 (FP8), both of 32 (MXFP8, NVFP4);
    Transformer Engine asserts it in the first step, on the GPU only."""
    unit = ALIGNMENT.get(f.training.precision or "")
    if unit is None:
        return None
    for one in _quantized(f, unit, tokens=8 if unit == 16 else unit):
        if one.size % one.unit:
            text = f"{one.what} = {one.size} is not a multiple of {one.unit}, as {f.training.precision} needs"
            return Broken(one.key, text, one.nearest)
    return None


@dataclass(frozen=True)
class _Dimension:
    """A dimension of a matrix product on one rank, and the key that changes it."""

    key: str
    what: str
    size: int
    unit: int
    nearest: tuple[int, ...]  # values of the key


def _quantized(f: Facts, unit: int, tokens: int) -> Iterator[_Dimension]:
    """`tokens`: the unit of the tokens."""
    model, layout, training = f.model, f.layout, f.training
    cuts = (
        ("parallel.tp", "feed-forward width / tp", model.ffn, layout.tp, model.heads),
        ("parallel.etp", "experts' width / etp", model.moe_ffn, layout.expert_tp, None),
    )
    for key, what, width, pieces, heads in cuts:
        if width:
            nearest = () if width % unit else divisors(width // unit, pieces, heads or 0)
            yield _Dimension(key, what, width // pieces, unit, nearest)
    if model.hidden:
        yield _Dimension("model.hidden_size", "hidden size", model.hidden, unit, multiples(model.hidden, unit))
    if training.seq_length and training.mbs:
        size = training.seq_length * training.mbs // layout.cp
        nearest = multiples(training.seq_length, tokens * layout.cp // math.gcd(tokens * layout.cp, training.mbs))
        yield _Dimension("training.seq_length", "tokens of a micro-batch on a rank", size, tokens, nearest)


def one_kind_of_half_precision(f: Facts) -> Broken | None:
    """Not both bf16 and fp16; transformer_config.py refuses the pair."""
    if not (f.training.bf16 and f.training.fp16):
        return None
    return Broken("model.fp16", "true together with model.bf16: true", (False,))


def tensor_overlap_is_not_switched_off(f: Facts) -> Broken | None:
    """Overlapped tensor parallel communication needs tp above 1 and sequence parallelism: without, comm_overlap.py
    turns it off with only a line in the log.
    """
    if not f.kernels.tp_comm_overlap or (f.layout.tp > 1 and f.layout.sp):
        return None
    text = "is switched off by Bridge without parallel.tp > 1 and parallel.sp: true"
    return warning("comm_overlap.tp_comm_overlap", text, (False,))


RULES = (
    sizes_are_set,
    heads_divide_the_hidden_size,
    heads_divide,
    key_value_groups_divide,
    feed_forward_divides,
    vocabulary_divides,
    sequence_parallelism_needs_tensor_parallelism,
    sequence_divides_over_context,
    sequence_divides_over_tensor_ranks,
    sequence_fits_the_positions,
    sequence_keeps_its_positions,
    rotary_positions_turn_pairs,
    context_ranks_exchange_in_a_known_way,
    masks_of_documents_have_no_context_parallelism,
    heads_learn_within_examples,
    low_precision_is_aligned,
    one_kind_of_half_precision,
    tensor_overlap_is_not_switched_off,
)
