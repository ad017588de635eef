"""What of another run's checkpoint counts in a run that continues from it; e2e/test_continue_from.py trains some."""

import contextlib
from types import SimpleNamespace

import pytest

from megaboa.bridge import continuation


def config(batch=8, train_iters=20, **model):
    return SimpleNamespace(
        train=SimpleNamespace(global_batch_size=batch, train_iters=train_iters),
        model=SimpleNamespace(**{"num_layers": 2, "kv_channels": None, "moe_layer_freq": (1, 0), **model}),
    )


THEIRS = {
    "train": {"global_batch_size": 8},
    "model": {"num_layers": 2, "kv_channels": 16, "moe_layer_freq": [1, 0], "rotary_base": 10000},
}


def test_the_same_model_is_accepted_with_what_is_derived_later():
    continuation.refuse(config(), THEIRS, iteration=10)
    continuation.refuse(config(rotary_base=10000.0), THEIRS, iteration=10)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 4}, "the checkpoint has model.num_layers 2, and this run 4"),
        ({"rotary_base": 500000}, "model.rotary_base 10000, and this run 500000"),
        ({"moe_layer_freq": [1, 1]}, "model.moe_layer_freq"),
        ({"train_iters": 10}, "the run begins after step 10 and ends at 10: raise training.train_iters"),
        ({"batch": 4}, "set training.global_batch_size to 8 or more, not 4"),
    ],
)
def test_what_recipes_and_overrides_made_of_it_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        continuation.refuse(config(**changes), THEIRS, iteration=10)


@pytest.mark.parametrize(
    ("saved", "own", "refused"),
    [
        ({"dist_ckpt_optim_fully_reshardable": False}, {"tensor_model_parallel_size": 2}, True),
        ({"dist_ckpt_optim_fully_reshardable": False}, {"virtual_pipeline_model_parallel_size": 2}, True),
        ({"dist_ckpt_optim_fully_reshardable": False}, {"tensor_model_parallel_size": 1}, False),
        ({"dist_ckpt_optim_fully_reshardable": False}, {"expert_tensor_parallel_size": 2}, True),
        (
            {"dist_ckpt_optim_fully_reshardable": False, "ckpt_format": "fsdp_dtensor"},
            {"context_parallel_size": 2},
            False,
        ),
        ({"dist_ckpt_optim_fully_reshardable": True}, {"tensor_model_parallel_size": 2}, False),
        ({}, {"tensor_model_parallel_size": 2}, False),
    ],
)
@pytest.mark.parametrize("distributed", [True, False])
def test_shards_that_were_saved_as_they_lie_are_refused_by_another_layout(saved, own, refused, distributed):
    asked = config(**own)
    asked.optimizer = asked.ddp = SimpleNamespace(use_distributed_optimizer=distributed)
    theirs = {**THEIRS, "checkpoint": saved}
    with pytest.raises(ValueError, match="reshardable: false") if refused and distributed else contextlib.nullcontext():
        continuation.refuse_other_layout(asked, theirs)


@pytest.mark.parametrize("with_part", [True, False])
@pytest.mark.parametrize(
    ("whole", "was", "own", "kept"),
    [(False, True, False, True), (False, False, True, False), (False, True, True, True), (True, False, True, True)],
)
def test_buckets_stay_as_the_state_was_saved(with_part, whole, was, own, kept):
    asked = config()

    def part(**more):
        return SimpleNamespace(overlap_grad_reduce=own, overlap_param_gather=own, bucket_size=None, **more)

    asked.optimizer = SimpleNamespace(use_distributed_optimizer=True, overlap_param_gather=own)
    asked.ddp, asked.comm_overlap = part(num_buckets=4), part() if with_part else None
    size = 1 << 27 if was else None
    saved = {"overlap_grad_reduce": was, "bucket_size": size}
    theirs = {"checkpoint": {"dist_ckpt_optim_fully_reshardable": whole}, "ddp": saved}
    said = continuation.keep_buckets(asked, theirs)
    assert len(said) == (was != own and not whole)
    parts = [asked.ddp, *filter(None, [asked.comm_overlap])]
    assert all(part.overlap_grad_reduce == kept for part in parts)
    assert all(part.bucket_size == (None if whole else size) for part in parts)
    assert asked.ddp.num_buckets == (4 if whole else None)
    if not whole:
        assert [part.overlap_param_gather for part in (*parts, asked.optimizer)] == [own and was] * (len(parts) + 1)


@pytest.mark.parametrize(
    ("own", "of_tokenizer", "said"),
    [
        (512, False, None),
        (500, False, "has 512 rows of vocabulary, and the model 500: move it away"),
        (500, True, None),  # decided when ranks start
        (None, False, None),
    ],
)
def test_rows_of_another_vocabulary_are_refused(own, of_tokenizer, said):
    saved = {"vocab_size": 500, "should_pad_vocab": True, "make_vocab_size_divisible_by": 64}
    model = {**saved, "tensor_model_parallel_size": 2}
    asked = SimpleNamespace(
        checkpoint=SimpleNamespace(load="checkpoints/iter_0000010"),
        model=SimpleNamespace(vocab_size=own),
        tokenizer=SimpleNamespace(use_tokenizer_vocab_size=of_tokenizer),
    )
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        continuation.refuse_other_rows(asked, {"model": model})


def optimizer(distributed, bf16=False, name="adam", ep=1):
    return SimpleNamespace(
        optimizer=SimpleNamespace(use_distributed_optimizer=False, optimizer=name),
        ddp=SimpleNamespace(use_distributed_optimizer=distributed),
        model=SimpleNamespace(bf16=bf16, fp16=False, expert_model_parallel_size=ep),
        mixed_precision=None,
    )


@pytest.mark.parametrize(
    ("own", "saved", "said"),
    [
        (optimizer(True, bf16=True), {"distributed": True, "bf16": False}, None),
        (optimizer(False), {"distributed": False, "bf16": False}, None),
        (optimizer(False), {"distributed": True, "bf16": False}, "use_distributed_optimizer True, and this run False"),
        (optimizer(False, bf16=True), {"distributed": False, "bf16": False}, "fp32 and 16 bits have states of another"),
        (optimizer(False, name="muon"), {"distributed": False, "bf16": False}, "muon can't take the state of adam"),
    ],
)
def test_an_optimizers_state_of_another_form_is_refused(own, saved, said):
    theirs = {"optimizer": {"use_distributed_optimizer": saved["distributed"]}, "model": {"bf16": saved["bf16"]}}
    theirs["optimizer"]["optimizer"] = "adam"
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        continuation.refuse_optimizer(own, theirs)


@pytest.mark.parametrize(("name", "refused"), [("muon", True), ("adam", False)])
def test_experts_that_are_spread_have_a_muon_of_their_own(name, refused):
    theirs = {"optimizer": {"optimizer": name}, "model": {"expert_model_parallel_size": 2}}
    said = "muon keeps experts that are spread over ranks apart"
    with pytest.raises(ValueError, match=said) if refused else contextlib.nullcontext():
        continuation.refuse_optimizer(optimizer(False, name=name), theirs)
    continuation.refuse_optimizer(optimizer(False, name=name, ep=4), theirs)


def test_of_a_group_of_parameters_only_what_was_done_is_the_checkpoints():
    group = {"params": [0], "step": 10, "betas": (0.9, 0.95), "max_lr": 1e-3, "weight_decay": 0.1}
    assert continuation.settings_of(group) == {"betas": (0.9, 0.95), "max_lr": 1e-3, "weight_decay": 0.1}


def test_one_optimizers_state_is_that_of_two_and_the_other_way_round():
    groups = [{"step": 10, "is_expert_parallel": expert} for expert in (False, True)]
    whole = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    split = continuation.in_parts({**whole, 0: {"param_state": "a"}, 1: {"param_state": "b"}}, 2)
    assert split == {0: {**whole, "param_state": "a"}, 1: {**whole, "param_state": "b"}}
    parts = {number: {"optimizer": {"param_groups": [groups[number]]}} for number in (0, 1)}
    assert continuation.in_parts({**parts, "param_state": "c"}, 1) == {
        "optimizer": {"param_groups": groups},
        "param_state": "c",
    }
    assert continuation.in_parts(parts, 2) == parts and continuation.in_parts(whole, 1) == whole


@pytest.mark.parametrize(("saved", "kept"), [({}, True), ({"round": True}, True), ({"round": None}, None)])
def test_a_run_keeps_the_positions_that_its_checkpoint_was_trained_with(saved, kept):
    """Earlier versions left YaRN's range unrounded where the model's config doesn't say."""
    field = "yarn_correction_range_round_to_int"
    asked = config(**{field: True})
    changes = continuation.keep_positions(asked, {"model": {field: saved["round"]} if saved else {}})
    assert getattr(asked.model, field) is kept and bool(changes) == (kept is None)
    assert continuation.keep_positions(config(), {"model": {field: None}}) == []
