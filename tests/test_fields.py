"""The table of Bridge's fields against the sources of Bridge and Megatron-Core, read without importing them."""

from __future__ import annotations

import pytest
from declared import declared

from megaboa.config.keys import all_keys, override_problem
from megaboa.fields import BRIDGE_FIELDS, INSTEAD_OF_OVERRIDES, OWN_FIELDS, SAME_AS, key_of

# Where the fields of each part of the ConfigContainer are declared: its own class and those that it inherits from.
SOURCES = {
    "train": [
        ("training/config/training_config.py", "TrainingConfig"),
        ("bridge/training/config.py", "TrainingConfig"),
    ],
    "validation": [("training/config/training_config.py", "ValidationConfig")],
    "scheduler": [("training/config/training_config.py", "SchedulerConfig")],
    "checkpoint": [("training/config/training_config.py", "CheckpointConfig")],
    "rng": [("training/config/common_config.py", "RNGConfig")],
    "dist": [("training/config/common_config.py", "DistributedInitConfig")],
    "profiling": [("training/config/common_config.py", "ProfilingConfig")],
    "optimizer": [("core/optimizer/optimizer_config.py", "OptimizerConfig")],
    "ddp": [("core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig")],
    "model": [
        ("core/model_parallel_config.py", "ModelParallelConfig"),
        ("bridge/models/gpt_provider.py", "GPTModelProvider"),
    ],
    "dataset": [
        ("core/datasets/blended_megatron_dataset_config.py", "BlendedMegatronDatasetConfig"),
        ("core/datasets/gpt_dataset.py", "GPTDatasetConfig"),
        ("bridge/training/config.py", "GPTDatasetConfig"),
        ("bridge/data/base.py", "DataloaderConfig"),
    ],
}


@pytest.mark.parametrize(
    "field", sorted({field for fields in BRIDGE_FIELDS.values() for field in fields} | {*OWN_FIELDS})
)
def test_field_exists(field: str) -> None:
    section, _, name = field.partition(".")
    if not name:
        assert section in declared("bridge/training/config.py", "ConfigContainer")
    else:
        assert any(name in declared(*source) for source in SOURCES[section])


def test_keys_exist() -> None:
    assert set(BRIDGE_FIELDS) <= set(all_keys())


def test_every_key_that_changes_a_run_has_its_field() -> None:
    sections = ("training", "optimizer", "schedule", "parallel", "checkpoint", "profile", "data", "load.")
    ours = {
        "checkpoint.keep_every",
        "checkpoint.local.every",  # set together with Bridge's fields of its second tier
        "checkpoint.local.folder",
        "checkpoint.local.partner",
        "training.nudge",
        "checkpoint.verify",
        "data.validation_sets",
        "data.max_epochs",
        "profile.domains",
        "profile.arguments",
    }  # what is done beside Bridge
    found = {key for key in all_keys() if key.startswith(sections)}
    fim = {key for key in found if key.startswith("data.fim.")}  # fields of another class than the dataset's usual one
    assert (found - fim) | {"launch.timeout_minutes"} == set(BRIDGE_FIELDS) | ours


def test_only_keys_of_the_start_take_the_place_of_overrides() -> None:
    """An experiment that set a field by `overrides` before there was a key keeps its identity, and so its store."""
    remedy = "a new key: leave it out of fields.INSTEAD_OF_OVERRIDES, or runs with that override train again"
    assert len(INSTEAD_OF_OVERRIDES) == 50, remedy
    assert set(BRIDGE_FIELDS) > INSTEAD_OF_OVERRIDES
    newer = set(BRIDGE_FIELDS) - INSTEAD_OF_OVERRIDES
    assert newer >= {"parallel.overlap_grad_reduce", "parallel.overlap_param_gather"}
    fields = {field for key in newer for field in BRIDGE_FIELDS[key]}
    assert not fields & SAME_AS.keys() and all(override_problem(field) is None for field in fields)


def test_fields_lead_back_to_their_keys() -> None:
    assert key_of("model.seq_length") == "training.seq_length"
    assert key_of("train.train_iters") == SAME_AS["train.train_iters"] == "training.train_iters"
    assert key_of("model.moe_permute_fusion") is None
    assert "mixed_precision" not in SAME_AS
