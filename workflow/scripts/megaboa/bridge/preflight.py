"""Preflight: Bridge's own configuration of every run of an experiment, built and validated without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megaboa import files, records
from megaboa.blends import corpora
from megaboa.bridge.process import playing_rank_0_of
from megaboa.check import hidden_act, needs_image, rope
from megaboa.check.facts import Facts
from megaboa.data import hub
from megaboa.errors import InputError
from megaboa.paths import RunFolder
from megaboa.records import LaunchSpec, ModelSource, RunCheck, RunSpec, Tree, plain

# Settings that may differ between runs with the same model on the same ranks.
_OTHER = ("optimizer", "schedule", "data")
_OF_THE_MODEL = ("model.", "tokenizer.")  # overrides that can change its tensors
_OTHER_TRAINING = ("train_iters", "seed", "eval_interval", "eval_iters")


Played = dict[str, Any]  # fields of a RunCheck that come from a dry run


class NotInTheImageError(Exception):
    """The image lacks something that a run needs."""


def check(
    experiment: Path, runs: Sequence[str], inside: needs_image.Packages | None = None
) -> dict[str, tuple[RunCheck, Facts | None]]:
    """Check runs. PASS comes with values from the configuration, FAIL with the problems. NOT_RUN: the hub doesn't
    provide what a recipe reads, so the run can't be judged.

    Each result comes with the run's facts, if it has a configuration. One dry run serves all runs with the same model
    and layout. `inside`: the image's packages, if this process runs in the image.
    """
    from megaboa.bridge.configuration import architecture

    folders, played = {name: RunFolder(experiment / "runs" / name) for name in runs}, dict[str, Played]()
    for folder in {folder.run.model["name"]: folder for folder in folders.values()}.values():
        architecture(folder)  # a model that isn't in the store any more is no fault of its runs
    return {name: check_run(folder, played, inside) for name, folder in folders.items()}


def check_run(
    folder: RunFolder, played: dict[str, Played], inside: needs_image.Packages | None = None
) -> tuple[RunCheck, Facts | None]:
    known: list[Facts] = []
    with playing_rank_0_of(folder.run.world_size), as_on_a_gpu():
        try:
            return _check(folder, played, known, inside), known[0]
        except hub.HubError as error:
            return RunCheck(state="NOT_RUN", reasons=(str(error),)), None
        except (Exception, SystemExit) as error:
            return _failed(_objection(error, folder.run)), known[0] if known else None


def _check(
    folder: RunFolder, played: dict[str, Played], known: list[Facts], inside: needs_image.Packages | None
) -> RunCheck:
    from megatron.bridge.training.config import runtime_config_update

    from megaboa.bridge import configuration, cpu, recipe_models
    from megaboa.bridge.config_facts import facts_of
    from megaboa.check import memory, table

    run, inputs = folder.run, configuration.Inputs.before_payloads(folder)
    config = configuration.build_as_launched(folder, inputs)
    if run.own_recipe:
        recipe_models.refuse_misspelt(config, run.own_recipe)
    facts = _with_config(facts_of(config, run, folder.launch, folder.profile), inputs.source)
    known.append(facts)
    findings = table.check(facts)
    if errors := [str(one) for one in findings if one.level == "error"]:
        return _failed(*errors)
    lacking, still_open = needs_image.judge(facts, inside) if inside else ([], needs_image.unchecked(facts))
    if missing := [*missing_trackers(folder.launch, inside is not None), *lacking]:
        return _failed(*missing)
    if run.device == "cpu":
        cpu.refuse(config)
    if folder.launch.checkpoint.get("save_interval", config.checkpoint.save_interval) != 0:
        config.checkpoint.save = "checkpoints"  # so that the requirements for saving are validated too
    config.dataset.path_to_cache = "cache"  # every run has a cache
    turned_off = _turned_off(config, {**run.overrides, **(folder.launch.overrides)})
    with _of_version(inside):
        stopped_at = _unless_for_the_image(run, lambda: runtime_config_update(config), turned_off, inside)
    if lacking := without_image(facts, folder) if inside is None else None:
        return _failed(lacking)
    result = RunCheck(
        state="PASS",
        data_parallel_size=facts.layout.dp,
        train_iters=config.train.train_iters,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        seq_length=config.dataset.seq_length,
        split=getattr(config.dataset, "split", None),
        memory_gib=memory.peak(facts).gib() if memory.is_known(facts) else None,
        facts=dataclasses.asdict(facts),
        warnings=(*map(str, findings), *_without_data(config, folder)),
        needs_gpu=tuple(still_open) if inside else None,
        needs_image=None if inside else tuple(still_open),
        stopped_at=stopped_at,
        environment={name: str(value) for name, value in config.env_vars.items()} or None,
    )
    key = _played_by(run)
    if stopped_at is None and key not in played:
        played[key] = _play(config, run, turned_off, inside)
        if "parameters" in played[key] and inside is None:
            played[key] |= _play_export(config, run, inputs.source, played)
    return dataclasses.replace(result, **played.get(key, {}))


def _with_config(facts: Facts, source: ModelSource | None) -> Facts:
    """Add what Bridge's configuration doesn't keep of the model's config."""
    if source is None:
        return facts
    config = files.read_json(Path(source.path) / "config.json")
    found = {"longest_plain": rope.longest_plain(config), "activation": hidden_act.named(config)}
    return dataclasses.replace(facts, model=dataclasses.replace(facts.model, **found))


def _without_data(config: Any, folder: RunFolder) -> list[str]:
    """A warning of what a recipe's own dataset lacks here. Where ranks run it may be there."""
    from megaboa.bridge import datasets

    if corpora(folder.run.data) or not (missing := datasets.missing_files(config.dataset)):
        return []
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    mount = ", in the image too (image.mounts)" if folder.launch.image else ""
    return [f"the recipe's config.dataset: there is no {missing[0]}{more}: ranks must find it{mount}"]


def without_image(facts: Facts, folder: RunFolder) -> str | None:
    """What the ranks' Python, or the image built for them, is known to lack, if no other image will come; else None."""
    launch = folder.launch
    if launch.image is None:
        if launch.start and launch.start.python:  # its packages aren't known here
            return None
        return needs_image.lacking_package(facts, needs_image.installed(), "this Python")
    asked = records.read_if_there(records.ImageAsked, folder.experiment_folder.specs.image)
    built = asked.container.build if asked and asked.container else None
    if not built or not built.pinned:
        return None
    return needs_image.lacking_package(facts, {}, "the image of containers/")


def missing_trackers(launch: LaunchSpec, inside: bool = False) -> list[str]:
    """Trackers whose packages are missing, which would fail the first step. Outside of an image, nothing is known about
    its Python."""
    if not inside and (launch.image or (launch.start and launch.start.python)):
        return []
    wanted, where = launch.trackers, "in the image" if inside else "here"
    remedy = "install it where the ranks run, or remove the key"
    return [
        f"trackers.{name}: the package {name} is not installed {where}: {remedy}"
        for name in ("wandb", "mlflow")
        if wanted.get(name) is not None and importlib.util.find_spec(name) is None
    ]


def _play(config: Any, run: RunSpec, turned_off: set[str], inside: needs_image.Packages | None) -> Played:
    from megaboa.bridge import dryrun

    made: Played = {}
    try:
        stopped_at = _unless_for_the_image(
            run, lambda: made.update(parameters=dryrun.parameters(config, run.world_size)), turned_off, inside
        )
    except (Exception, SystemExit) as error:
        return {"state": "FAIL", "reasons": (_objection(error, run),)}
    return {**made, **({"stopped_at": stopped_at} if stopped_at else {})}


def _play_export(config: Any, run: RunSpec, source: ModelSource | None, played: dict[str, Played]) -> Played:
    """What an export of the trained model would lack, or have too much. A model that comes with weights is imported
    before it is trained, which shows the same."""
    from megaboa.bridge import dryrun
    from megaboa.bridge.source import has_weights

    if source is None or has_weights(source):
        return {}
    changes = {name: value for name, value in run.overrides.items() if name.startswith(_OF_THE_MODEL)}
    key = files.digest({"model": run.model, "overrides": changes, "device": run.device})
    if key not in played:
        try:
            found = dryrun.export(config, source, run.device)
            played[key] = {} if found.passed else {"export": found.detail}
        except Exception as error:  # of Bridge, or of the simulation; the export itself will show which
            played[key] = {"export_unknown": _objection(error, run)}
    return played[key]


def _turned_off(config: Any, overrides: Tree) -> set[str]:
    """Kernel switches that the run itself has turned off. Must be called before validation, because the CPU backend,
    and Bridge without Transformer Engine, turn all of them off."""
    off = {name for name in needs_image.SWITCHES if overrides.get(f"model.{name}") is False}
    return off if getattr(config.model, "moe_grouped_gemm", False) else {*off, "moe_grouped_gemm"}


def _unless_for_the_image(
    run: RunSpec, act: Callable[[], object], turned_off: set[str], inside: needs_image.Packages | None
) -> str | None:
    """Run a validation step. If Bridge stops because a package of the image is missing here, return where it stopped.

    Inside the image, such a missing package is an error. Other errors are raised in any case.
    """
    try:
        act()
    except Exception as error:
        said = _objection(error, run)
        what = needs_image.missing(said, turned_off) if run.device == "cuda" else None
        if what is None:
            raise
        if inside and (lacking := needs_image.lacks(what, said, inside)):
            raise NotInTheImageError(lacking) from error
        return f"{what}; checked up to: {said}"
    return None


@contextlib.contextmanager
def _of_version(inside: needs_image.Packages | None) -> Iterator[None]:
    """Tell Megatron the image's version of Transformer Engine, which many of its checks need, although the CPU backend
    hides the package. Not during imports, which would look for its modules."""
    from megatron.core import utils
    from packaging.version import Version

    version = (inside or {}).get("transformer_engine")
    if version in (None, needs_image.UNKNOWN):
        yield
        return
    before, utils._te_version = utils._te_version, Version(version)
    try:
        yield
    finally:
        utils._te_version = before


def _objection(error: BaseException, run: RunSpec) -> str:
    """Bridge's error message, or ours, in one line; with the lines of the user's recipe that led to it."""
    from megaboa.bridge import recipe_models

    said = _sentence(error)
    if not run.own_recipe or not (calls := recipe_models.calls_to(error, run.own_recipe)):
        return said
    cause = f"; because of {_sentence(error.__cause__)}" if error.__cause__ else ""
    return f"{said} (at {calls}{cause})"


def _sentence(error: BaseException) -> str:
    said = " ".join(str(error).split())
    if isinstance(error, InputError):
        return said
    named = f"{type(error).__name__}: {said}"
    if "'NoneType' object" not in said:
        return named
    line = traceback.extract_tb(error.__traceback__)[-1].line  # without it nobody knows what is None
    return f"{named} ({line})"


def _failed(*reasons: str) -> RunCheck:
    return RunCheck(state="FAIL", reasons=reasons)


def _played_by(run: RunSpec) -> str:
    training = {name: value for name, value in run.training.items() if name not in _OTHER_TRAINING}
    return files.digest(
        {**{name: value for name, value in plain(run).items() if name not in _OTHER}, "training": training}
    )


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Answer Hopper when Bridge asks for the GPU's type, which it does if experts use the flex dispatcher.

    A rule of ours checks whether DeepEP supports the GPU in `resources.gpu`.
    """
    import torch

    ask = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=9, minor=0, name="NVIDIA H100")
    try:
        yield
    finally:
        torch.cuda.get_device_properties = ask
