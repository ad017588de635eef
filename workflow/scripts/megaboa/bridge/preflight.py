"""Bridge's own configuration of every run of an experiment, built and validated on a machine without a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaboa.results import RunFolder


def check(experiment: Path, runs: list[str]) -> dict[str, dict[str, Any]]:
    """Per run: `{"state": "PASS"}` and what the configuration says of itself, or FAIL and Bridge's own objection."""
    return {name: check_run(RunFolder(experiment / "runs" / name)) for name in runs}


def check_run(folder: RunFolder) -> dict[str, Any]:
    from megatron.bridge.training.config import runtime_config_update

    from megaboa.bridge import configuration, cpu

    with playing_rank_0_of(folder.run["world_size"]):
        try:
            config = configuration.build(folder.run, configuration.Inputs.before_payloads(folder))
            if folder.run["device"] == "cpu":
                cpu.refuse(config)
            runtime_config_update(config)
        except Exception as error:
            return {"state": "FAIL", "error": type(error).__name__, "detail": " ".join(str(error).split())}
    return {
        "state": "PASS",
        "data_parallel_size": config.data_parallel_size,
        "train_iters": config.train.train_iters,
        "global_batch_size": config.train.global_batch_size,
        "micro_batch_size": config.train.micro_batch_size,
        "seq_length": config.dataset.seq_length,
        "split": getattr(config.dataset, "split", None),
    }


@contextlib.contextmanager
def playing_rank_0_of(world_size: int) -> Iterator[None]:
    """Bridge asks the environment how many ranks there are."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
