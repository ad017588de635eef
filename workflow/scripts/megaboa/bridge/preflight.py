"""Bridge's own configuration of every run of an experiment, built and validated on a machine without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megaboa import files
from megaboa.preflight import image
from megaboa.preflight.facts import Facts
from megaboa.results import RunFolder

Result = dict[str, Any]

# What two runs may differ in and still build the same model on the same ranks.
_OTHER = ("optimizer", "schedule", "data")
_OTHER_TRAINING = ("train_iters", "seed", "eval_interval", "eval_iters")


def check(experiment: Path, runs: list[str]) -> dict[str, tuple[Result, Facts | None]]:
    """Per run: `{"state": "PASS"}` and what the configuration says of itself, or FAIL and what is wrong with it.

    With it the facts, where there is a configuration. One dry run serves all runs of one model and layout.
    """
    played: dict[str, Result] = {}
    return {name: check_run(RunFolder(experiment / "runs" / name), played) for name in runs}


def check_run(folder: RunFolder, played: dict[str, Result]) -> tuple[Result, Facts | None]:
    known: list[Facts] = []
    with playing_rank_0_of(folder.run["world_size"]), as_on_a_gpu():
        try:
            return _check(folder, played, known), known[0]
        except Exception as error:
            return _objection(error), known[0] if known else None


def _check(folder: RunFolder, played: dict[str, Result], known: list[Facts]) -> Result:
    from megatron.bridge.training.config import runtime_config_update

    from megaboa.bridge import configuration, cpu
    from megaboa.bridge.facts import facts_of
    from megaboa.estimate import memory
    from megaboa.preflight import table

    run, inputs = folder.run, configuration.Inputs.before_payloads(folder)
    config = configuration.build(run, inputs)
    configuration.override(config, folder.launch.get("overrides") or {})
    facts = facts_of(config, run, folder.launch, folder.profile, inputs.source)
    known.append(facts)
    findings = table.check(facts)
    if errors := [str(one) for one in findings if one.level == "error"]:
        return {"state": "FAIL", "reasons": errors}
    if missing := missing_trackers(folder.launch):
        return {"state": "FAIL", "reasons": missing}
    if run["device"] == "cpu":
        cpu.refuse(config)
    if folder.launch["checkpoint"].get("save_interval") != 0:
        config.checkpoint.save = "checkpoints"  # so that what a saving run needs is validated too
    turned_off = _turned_off(config, {**run["overrides"], **(folder.launch.get("overrides") or {})})
    stopped_at = _unless_for_the_image(run, lambda: runtime_config_update(config), turned_off)
    result = {
        "state": "PASS",
        "data_parallel_size": facts.layout.dp,
        "train_iters": config.train.train_iters,
        "global_batch_size": config.train.global_batch_size,
        "micro_batch_size": config.train.micro_batch_size,
        "seq_length": config.dataset.seq_length,
        "split": getattr(config.dataset, "split", None),
        "memory_gib": memory.peak(facts).gib() if memory.is_known(facts) else None,
        "facts": dataclasses.asdict(facts),
        "warnings": [str(one) for one in findings],
        "needs_image": image.unchecked(facts) if _without_image() else [],
        "stopped_at": stopped_at,
    }
    key = _played_by(run)
    if stopped_at is None and key not in played:
        played[key] = _play(config, run, turned_off)
    return {**result, **played.get(key, {})}


def missing_trackers(launch: dict[str, Any]) -> list[str]:
    """What the first step would end with. Of a Python that a container brings nothing is known here."""
    if (launch.get("start") or {}).get("python"):
        return []
    wanted = launch.get("trackers") or {}
    return [
        f"trackers.{name}: the package {name} is not installed here: install it where the ranks run, or remove the key"
        for name in ("wandb", "mlflow")
        if wanted.get(name) is not None and importlib.util.find_spec(name) is None
    ]


def _play(config: Any, run: dict[str, Any], turned_off: set[str]) -> Result:
    from megaboa.bridge import dryrun

    made: Result = {}
    try:
        stopped_at = _unless_for_the_image(
            run, lambda: made.update(parameters=dryrun.parameters(config, run["world_size"])), turned_off
        )
    except Exception as error:
        return _objection(error)
    return {**made, **({"stopped_at": stopped_at} if stopped_at else {})}


def _turned_off(config: Any, overrides: dict[str, Any]) -> set[str]:
    """Switches of kernels that are off by the run's own will. To be asked before validation, as the CPU backend, and
    Bridge without Transformer Engine, turn off all of them."""
    off = {name for name in image.SWITCHES if overrides.get(f"model.{name}") is False}
    return off if getattr(config.model, "moe_grouped_gemm", False) else {*off, "moe_grouped_gemm"}


def _unless_for_the_image(run: dict[str, Any], act: Callable[[], object], turned_off: set[str]) -> str | None:
    """Where Bridge stopped for want of what only the image has, for GPUs: no reason to refuse the run. Other objections
    are raised."""
    try:
        act()
    except Exception as error:
        said = _objection(error)["reasons"][0]
        what = image.missing(said, turned_off) if run["device"] == "cuda" and _without_image() else None
        if what is None:
            raise
        return f"{what}; checked up to: {said}"
    return None


def _without_image() -> bool:
    return importlib.util.find_spec("transformer_engine") is None


def _objection(error: Exception) -> Result:
    """What Bridge says, in one line."""
    return {"state": "FAIL", "reasons": [f"{type(error).__name__}: {' '.join(str(error).split())}"]}


def _played_by(run: dict[str, Any]) -> str:
    training = {name: value for name, value in run["training"].items() if name not in _OTHER_TRAINING}
    return files.digest({**{name: value for name, value in run.items() if name not in _OTHER}, "training": training})


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Bridge asks the first GPU what it is, where experts talk by the flex dispatcher: a Hopper, for want of one.

    Whether DeepEP knows the GPU of `resources.gpu` is a rule of ours.
    """
    import torch

    ask = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=9, minor=0, name="NVIDIA H100")
    try:
        yield
    finally:
        torch.cuda.get_device_properties = ask


def playing_rank_0_of(world_size: int) -> contextlib.AbstractContextManager[None]:
    return playing(0, world_size)


@contextlib.contextmanager
def playing(rank: int, world_size: int) -> Iterator[None]:
    """Bridge asks the environment which rank this is, and how many there are.

    Afterwards everything in it is as it was: Megatron sets variables by the attention that a model has, and refuses the
    next model where they are others.
    """
    before = dict(os.environ)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
