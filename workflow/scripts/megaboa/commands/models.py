"""Models between Hugging Face and Megatron. Conversions run where ranks do: in the image, if there is one."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megaboa import commands, store
from megaboa.bridge import handover, process
from megaboa.conversion import add_image, add_sizes, image_of, layout_of
from megaboa.files import write_json
from megaboa.formats import counted
from megaboa.layout import Layout
from megaboa.paths import run_of
from megaboa.records import (
    ExportRecord,
    ExportSpec,
    GenerateSpec,
    Generations,
    ImportRecord,
    ModelSource,
    ModelSpec,
    Proof,
    read,
    write,
)
from megaboa.run import submitted


def get_model(words: list[str]) -> None:
    """Make a model from a config, or find or fetch it. Needs no Megatron."""
    args = commands.job(get_model, "spec", "out").parse_args(words)
    handover.to_zygote("cpu")
    from megaboa.bridge.source import obtain

    manifest = obtain(read(ModelSpec, args.spec))
    write(args.out, manifest)
    print(f"model {manifest.name}: {manifest.params:,} parameters, {manifest.path}")


def import_model(words: list[str]) -> None:
    """Convert a Hugging Face model to a Megatron checkpoint, once per identity.

    With sizes of several ranks this is one of them, started by convert.py.
    """
    parser = commands.job(import_model, "source", "store", "out")
    parser.add_argument("--device", required=True, choices=["cpu", "cuda"])
    args, layout, is_last = _as_rank(parser, words)
    from megaboa.bridge.conversion_jobs import import_model as imported

    manifest = imported(_there(ModelSource, args.source), args.store, args.device, layout)
    if not is_last:
        return
    write(args.out, replace(manifest, **image_of(args)))
    print(f"model {manifest.name}: {manifest.tensors} tensors imported, {manifest.checkpoint}")


def prove_import(words: list[str]) -> None:
    """Prove that an imported Megatron checkpoint is the Hugging Face model.

    With sizes of several ranks this is one of them, started by convert.py.
    """
    args, layout, _ = _as_rank(commands.job(prove_import, "source", "import", "out"), words)
    manifest = getattr(args, "import")
    from megaboa.bridge.conversion_jobs import prove_import as prove

    source, imported = _there(ModelSource, args.source), read(ImportRecord, manifest)
    store.require(imported.checkpoint, manifest)
    prove(source, imported, manifest, layout, args.out, **image_of(args))


def export_model(words: list[str]) -> None:
    """Convert a checkpoint of a finished run to a Hugging Face folder.

    With sizes of several ranks this is one of them, started by convert.py.
    """
    args, layout, is_last = _as_rank(commands.job(export_model, "spec", "source", "out"), words)
    from megaboa.bridge.conversion_jobs import export_model as exported
    from megaboa.report.provenance import commit

    source, folder = _there(ModelSource, args.source), run_of(args.out)
    manifest = exported(read(ExportSpec, args.spec), folder, source, commit(), layout)
    if not is_last:
        return
    write(args.out, replace(manifest, **image_of(args)))
    print(f"exported iteration {manifest.iteration}: {manifest.path}")
    if best := manifest.best:
        print(
            f"it has the lowest validation loss, {best.loss:.4f}, of {counted(best.evaluated, 'evaluated checkpoint')} "
            f"({best.kept} are kept)"
        )


def prove_export(words: list[str]) -> None:
    """Prove that an export is the checkpoint of its run and runs on its own.

    With sizes of several ranks this is one of them, started by convert.py.
    """
    args, layout, _ = _as_rank(commands.job(prove_export, "export", "source", "out"), words)
    from megaboa.bridge.conversion_jobs import prove_export as prove

    export, source = _there(ExportRecord, args.export), _there(ModelSource, args.source)
    prove(export, args.export, source, layout, args.out, **image_of(args))


def generate(words: list[str]) -> None:
    """Give prompts to a run's checkpoint and to its export, and show what both say.

    With sizes of several ranks this is one of them, started by convert.py.
    """
    args, layout, is_last = _as_rank(commands.job(generate, "spec", "export", "source", "out"), words)
    from megaboa.bridge.conversion_jobs import generate as generated

    export, source = _there(ExportRecord, args.export), _there(ModelSource, args.source)
    found = generated(export, run_of(args.out), source, read(GenerateSpec, args.spec), layout)
    if not is_last:
        return
    for one in found:
        print(f"{export.run}, iteration {export.iteration}: {one.prompt!r}")
        print(f"  Megatron      {one.megatron!r}")
        print(f"  transformers  {'the same' if one.same else repr(one.transformers)}")
    facts = {"export": export.digest, "iteration": export.iteration, **image_of(args)}
    write(args.out, Generations(**facts, generations=tuple(found)))


def push_model(words: list[str]) -> None:
    """Send a proven export to the Hugging Face hub.

    The token comes from the environment alone.
    """
    parser = commands.job(push_model, "export", "proof", "out")
    parser.add_argument("--repository", required=True, help="owner/name")
    parser.add_argument("--private", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args(words)
    from megaboa.data import hub

    export, proof = _there(ExportRecord, args.export), read(Proof, args.proof)
    again = submitted.last(run_of(args.export).experiment_folder.path).with_words("push")
    hub.require_proven(export, proof, args.export, again)
    print(f"pushing {export.path} to {args.repository}", flush=True)
    what = f"{export.run}, iteration {export.iteration}"
    commit = hub.upload(Path(export.path), args.repository, args.private, what, f"export.push.{export.run}")
    write_json(args.out, {"repository": args.repository, "commit": commit, "digest": export.digest})
    print(f"pushed as commit {commit}")


def _there[Made: (ModelSource, ExportRecord)](kind: type[Made], manifest: Path) -> Made:
    """A manifest whose folder is there."""
    found = read(kind, manifest)
    store.require(found.path, manifest)
    return found


def _as_rank(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, Layout, bool]:
    """The arguments of a conversion, in the process that does it or is one of its ranks; and whether it is the last
    one, which writes down what came of it."""
    add_sizes(parser)
    add_image(parser)
    args = parser.parse_args(words)
    handover.to_zygote()
    layout = layout_of(args)
    return args, layout, process.join_ranks(layout) == (layout.world_size or 1) - 1
