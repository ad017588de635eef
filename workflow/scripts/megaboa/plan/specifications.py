"""Specifications of the jobs before and after training: what each needs to know, in a file of its own.

So that an edited experiment only reruns jobs whose own part has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from megaboa import conversion, files, store
from megaboa.config import keys
from megaboa.config.models.outputs import PredictedSetting
from megaboa.plan import documents, image_specs
from megaboa.plan.environment import environment
from megaboa.plan.given_files import expanded, expanded_source, pairs_of
from megaboa.plan.plan import Plan, Run
from megaboa.plan.shared import Shared
from megaboa.records import (
    SECTIONS,
    AlongSpec,
    BaselineSpec,
    Budget,
    ConversionSpec,
    CorpusSpec,
    CostsSpec,
    EvaluateSpec,
    ExportSpec,
    GenerateSpec,
    ImageAsked,
    IndexSpec,
    InsideAsked,
    ModelSpec,
    Record,
    ReportSpec,
    RunsSpec,
    Setting,
    SweepAxis,
    TensorsSpec,
    TextSpec,
    TokenizerSpec,
    Tree,
    TuneSpec,
    UnusedSpecs,
    plain,
)

KEPT = ("corpora", "exports", "indexes", "models")


def write(shared: Shared) -> None:
    """Write the specifications that have changed.

    Obsolete ones are removed, except those whose results stay, too: made again later, they would be newer than these.
    """
    wanted = {shared.folder / name: text for name, text in texts(shared)}
    for path, text in wanted.items():
        files.write_if_changed(path, text)
    specs = shared.paths.specs
    obsolete = {*specs.path.rglob("*.json")} - {*wanted, specs.unused}
    unused = sorted(path for path in obsolete if path.parent.name in KEPT)
    for path in obsolete.difference(unused):
        path.unlink()
    if unused or specs.unused.exists():
        names = tuple(str(path.relative_to(specs.path)) for path in unused)
        files.write_if_changed(specs.unused, files.canonical(plain(UnusedSpecs(names=names))))


def texts(shared: Shared) -> Iterator[tuple[str, str]]:
    """Texts of the specifications, by their names below the experiment's results."""
    for path, spec in contents(shared).items():
        yield f"specs/{path}", files.canonical(spec)


def contents(shared: Shared) -> dict[str, Tree]:
    """The specifications' contents, by their names below specs/."""
    specs: dict[str, Record] = {
        f"tokenizers/{name}.json": _tokenizer(shared, name) for name in shared.plan.experiment.tokenizers
    }
    specs |= {f"corpora/{name}.json": _corpus(shared, name) for name in shared.corpora}
    specs |= {f"models/{name}.json": _model(shared, name) for name in shared.sourced_models}
    specs |= {f"conversions/{name}.json": _conversion(shared, name) for name in shared.converted_models}
    specs |= {f"indexes/{name}.json": _index(shared, name) for name in shared.indexes}
    specs |= {f"exports/{name}.json": _export(shared, name) for name in shared.plan.exports}
    specs |= {f"along/{name}.json": _along(shared, name) for name in shared.along_runs}
    specs |= {"image.json": _image(shared), "inside.json": _inside(shared), "runs.json": _runs(shared)}
    specs |= {"costs.json": _costs(shared), "report.json": _report(shared)}
    specs |= {"evaluate.json": _evaluate(shared), "generate.json": _generate(shared)}
    specs |= {"tensors.json": _tensors(shared)} if shared.tensors else {}
    specs |= {"tune.json": tune(shared)} if shared.plan.experiment.tune.trials_of else {}
    return {name: plain(spec) for name, spec in specs.items()}


def _image(shared: Shared) -> ImageAsked:
    """The ranks' image, or else this Python."""
    wanted = image_specs.wanted(shared.plan.experiment)
    return ImageAsked(container=wanted) if wanted else ImageAsked(**vars(environment()))


def _inside(shared: Shared) -> InsideAsked:
    """This Python, for all jobs but ranks, and how to start processes in the image, if there is one.

    It is separate from image.json, because another partition, or a package of the login node, doesn't change the
    image.
    """
    inside = image_specs.inside(shared.plan.experiment, shared.profile)
    return InsideAsked(**vars(environment()), container=inside)


def _tokenizer(shared: Shared, name: str) -> TokenizerSpec:
    tokenizer = shared.plan.experiment.tokenizers[name]
    if tokenizer.files:
        rules = {"pattern": tokenizer.tiktoken_pattern, "special_tokens": tokenizer.tiktoken_num_special_tokens}
        return TokenizerSpec(
            name=name,
            store=shared.plan.experiment.store,
            train_on=None,
            vocab_size=tokenizer.size,
            **{kind: expanded(path) for kind, path in tokenizer.files.items()},
            **(rules if tokenizer.tiktoken else {}),
        )
    corpus = shared.plan.experiment.corpora[tokenizer.train_on]
    reading = ("text_key", "separator", "subset", "split", "revision", "limit", "max_document_mb", "on_bad_record")
    text = corpus.model_dump(include=set(reading))
    return TokenizerSpec(
        name=name,
        store=shared.plan.experiment.store,
        train_on=TextSpec(name=tokenizer.train_on, source=expanded_source(corpus.source), **text),
        vocab_size=tokenizer.size,
    )


def _corpus(shared: Shared, name: str) -> CorpusSpec:
    corpus = shared.corpora[name]
    given = pairs_of(corpus)
    return CorpusSpec(
        name=name,
        store=shared.plan.experiment.store,
        source=[pair.prefix for pair in given] if given else expanded_source(corpus.source),
        tokenizer=shared.corpus_tokenizer(name),
        pairs=given,
        filter=expanded(corpus.filter) if corpus.filter else None,
        **corpus.model_dump(exclude={"source", "megatron", "tokenizer", "shards", "filter"}),
    )


def _model(shared: Shared, name: str) -> ModelSpec:
    model = shared.plan.models[name]
    return ModelSpec(
        name=name,
        store=shared.plan.experiment.store,
        **model.model_dump(include={"revision", "config", "seed"}),
        hf=expanded(model.hf) if model.hf else None,
        tokenizer=shared.model_tokenizer(name),
        weights=name in shared.imported_models,
        device=shared.plan.experiment.device,
    )


def _conversion(shared: Shared, model: str) -> ConversionSpec:
    """How a model is imported, and by how many ranks. This is no input of the import, as it changes no weight."""
    run = shared.first_run_of(model)
    asked = shared.plan.models[model].conversion
    return ConversionSpec(
        layout=asked.model_dump(include=set(conversion.SIZES)),
        nodes=asked.nodes,
        gpus_per_node=asked.ranks // asked.nodes,
        cpus_per_rank=run.config.resources.cpus_per_rank,
        device=shared.plan.experiment.device,
        start=run.launch.start,
        image=run.launch.image,
    )


def _index(shared: Shared, name: str) -> IndexSpec:
    """An index. Any of its runs can build it, because it depends only on what they have in common."""
    runs = shared.indexes[name]
    return IndexSpec(
        name=name,
        store=shared.plan.experiment.store,
        run=runs[0].name,
        key=documents.index_key(runs[0].run),
        max_epochs=min(run.config.data.max_epochs for run in runs),
    )


def _export(shared: Shared, run: str) -> ExportSpec:
    """An export, without the push target, which is not part of the identity."""
    return ExportSpec(run=run, **shared.plan.experiment.export.model_dump(include={"checkpoint", "file_gb", "license"}))


def _along(shared: Shared, run: str) -> AlongSpec:
    asked = shared.plan.experiment.export
    every = asked.checkpoints if asked.checkpoints == "all" else asked.checkpoints.every
    return AlongSpec(
        run=run,
        every=None if every == "all" else every,
        command=shared.plan.experiment.evaluate.command if run in shared.plan.evaluated else None,
        files=shared.evaluation_files if run in shared.plan.evaluated else {},
        **asked.model_dump(include={"file_gb", "license"}),
    )


def _runs(shared: Shared) -> RunsSpec:
    """All runs in order. They are in a file, because ten thousand names don't fit on a command line.

    Digests of the runs are included, so that a job for all runs has this one input instead of ten thousand, which
    Snakemake would look through for every job that needs its output.
    """
    sweep = shared.plan.experiment.sweep
    return RunsSpec(
        runs=tuple(run.name for run in shared.plan.runs),
        identities={run.name: run.digest[: store.ID_LENGTH] for run in shared.plan.runs},
        skip_illegal=bool(sweep and sweep.skip_illegal),
    )


def _costs(shared: Shared) -> CostsSpec:
    """Inputs of preflight's costs, in a file that doesn't make preflight run again.

    Below a job that runs, Snakemake doesn't look for other reasons, so one more export would need a second call.
    """
    return CostsSpec(exports=tuple(shared.plan.exports), budget=Budget(**shared.plan.experiment.budget.model_dump()))


def tune(shared: Shared) -> TuneSpec:
    """The settings that one job tries in turn."""
    wanted = shared.plan.experiment.tune
    settings = []
    for run in shared.plan.runs:
        known = wanted.predicted.get(run.name, PredictedSetting())
        # The first is the run as it is. It has a value only because every run of a sweep needs one.
        values = dict(run.values) if settings else {}
        settings.append(Setting(name=run.name, values=values, seconds=known.seconds, gib=known.gib))
    begin, end = shared.plan.experiment.profile.steps
    models = {"models": list(shared.plan.experiment.models)}
    return TuneSpec(
        run=wanted.trials_of or "",
        swept=wanted.swept,
        paths={key: keys.split(key, models, value) for one in settings for key, value in one.values.items()},
        own=settings[0].name,
        settings=tuple(settings),
        steps=end - begin + 1,
        warmup=begin - 1,
        tolerance=wanted.tolerance,
        confidence=wanted.confidence,
        minutes=wanted.minutes,
        trial_minutes=wanted.trial_minutes,
    )


def _tensors(shared: Shared) -> TensorsSpec:
    return TensorsSpec(agreements=tuple(shared.tensor_agreements))


def _evaluate(shared: Shared) -> EvaluateSpec:
    return EvaluateSpec(command=shared.plan.experiment.evaluate.command, files=shared.evaluation_files)


def _generate(shared: Shared) -> GenerateSpec:
    wanted = shared.plan.experiment.generate
    return GenerateSpec(prompts=tuple(wanted.prompts), tokens=wanted.tokens)


def _report(shared: Shared) -> ReportSpec:
    wanted = shared.plan.experiment.report
    return ReportSpec(
        runs=tuple(run.name for run in shared.plan.runs),
        invalid=tuple(map(str, shared.plan.invalid)),
        excluded=shared.plan.excluded,
        title=wanted.title,
        question=wanted.question,
        agreements=tuple(shared.plan.agreements),
        published=shared.plan.published,
        figures=tuple(figure.model_dump(mode="json") for figure in wanted.figures),
        values={run.name: run.values for run in shared.plan.runs},
        unset=values_of_others(shared.plan),
        axes=tuple(
            SweepAxis(name=axis, labels=labels, runs={run.name: run.labels[axis] for run in shared.plan.runs})
            for axis, labels in shared.plan.axes.items()
        ),
        proofs=(*shared.import_proofs, *shared.export_proofs),
        profiles=tuple(shared.profiled_runs),
        evaluated=tuple(shared.plan.evaluated),
        along=tuple(shared.along_runs),
        baseline=_baseline(shared),
    )


def values_of_others(plan: Plan) -> dict[str, Tree]:
    """What each run has of the swept keys that only other runs set: figures by such a key show all runs."""
    found = {run.name: {key: value_of(run, key) for key in plan.swept if key not in run.values} for run in plan.runs}
    return {name: values for name, values in found.items() if values}


def value_of(run: Run, key: str) -> Any:
    """The value that a run was planned with; None if the plan doesn't know it, as of what its recipe decides."""
    section, _, name = key.partition(".")
    if section == "tuning" and name not in run.run.tuning:  # as the rank of a run without adapters
        return None
    decided = run.run.is_recipe and section in SECTIONS  # unless the experiment sets it
    found: Any = run.run if decided else run.config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else getattr(found, part, None)
    return found.model_dump(mode="json") if isinstance(found, BaseModel) else found


def _baseline(shared: Shared) -> BaselineSpec | None:
    asked = shared.plan.experiment.report.baseline
    return asked and BaselineSpec(paths=asked.paths, **asked.model_dump(exclude={"path"}))
