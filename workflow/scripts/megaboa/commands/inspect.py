"""Show what is in a checkpoint: tensors, shapes, types, files, iteration and layout; or compare two.

CHECKPOINT is EXPERIMENT/RUN or a run's folder (with @STEP for a step, else the newest complete checkpoint), any folder
in torch's distributed format (torch_dist), a folder of such iter_* folders, or a Hugging Face folder with safetensors.
Only the index is read, and nothing in it is executed. --norms also reads the numbers, piece by piece.
"""

import argparse
import dataclasses
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from megaboa import commands, formats
from megaboa.bridge import saved
from megaboa.errors import InputError
from megaboa.paths import RunFolder
from megaboa.run import checkpoints
from megaboa.run.versions import versions
from megaboa.store_paths import RunStore

SHOWN = 5


def main(words: list[str]) -> None:
    parser = commands.parser("inspect", __doc__)
    parser.add_argument("checkpoint", help="EXPERIMENT/RUN[@STEP], or a folder")
    parser.add_argument("other", nargs="?", help="compare with this one, tensor by tensor")
    parser.add_argument("--norms", action="store_true", help="read the numbers: norms, or differences of the two")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="tensors by name, such as 'decoder.*norm*'")
    parser.add_argument("--json", action="store_true", help="print JSON, with every piece of every tensor")
    args = parser.parse_args(words)
    both = [chosen(saved.look(folder_of(text)), args.only) for text in (args.checkpoint, args.other) if text]
    if len(both) == 1:
        found = {name: saved.values(*both, one) for name, one in both[0].tensors.items()} if args.norms else {}
        text = lines(both[0], found)
    else:
        common = both[0].tensors.keys() & both[1].tensors.keys()
        found = {name: saved.compare(*both, name, args.norms) for name in sorted(common)}
        text = compared(*both, found, args.norms)
    if args.json:
        told = {"checkpoints": [dataclasses.asdict(one) for one in both]}
        told["differences" if args.other else "values"] = {name: dataclasses.asdict(one) for name, one in found.items()}
        json.dump(told, sys.stdout, indent=1)
        print()
    else:
        print("\n".join(text))


def folder_of(text: str) -> Path:
    """The folder of the checkpoint that is meant."""
    if Path(text).is_dir() and not RunFolder(Path(text)).file("run").exists():
        return _newest_of(Path(text))
    name, _, step = text.partition("@")
    if step and not step.isdecimal():
        raise InputError(f"{text}: after @ stands a step, a whole number")
    if step and Path(name).is_dir() and not RunFolder(Path(name)).file("run").exists():
        return _existing(checkpoints.folder(Path(name), int(step)), Path(name))
    try:
        run = RunFolder(commands.run(name))
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{error}, or the folder of a checkpoint") from None
    if not run.attempts_link.exists():
        raise InputError(f"{name} was not trained yet: it has no checkpoint")
    store = RunStore.of(run.attempts_link)
    kept = {number: one.store.checkpoints for one in versions(run, store) for number in one.kept}
    if not kept:
        raise InputError(f"{name} has no complete checkpoint in {store.checkpoints}")
    wanted = int(step) if step else max(kept)
    if wanted not in kept:
        listed = ", ".join(map(str, sorted(kept)))
        raise InputError(f"{name} has no complete checkpoint of step {wanted}; it has {listed}")
    return checkpoints.folder(kept[wanted], wanted)


def _newest_of(folder: Path) -> Path:
    """Of a folder of checkpoints the newest that is complete, by our marker or by the index, which is written last."""
    found = sorted(path for path in folder.glob("iter_*") if path.is_dir())
    whole = [path for path in found if (path / checkpoints.MARKER).exists()]
    whole = whole or [path for path in found if (path / saved.INDEX).exists()]
    return (whole or found or [folder])[-1]


def _existing(path: Path, among: Path) -> Path:
    if path.is_dir():
        return path
    there = ", ".join(sorted(one.name for one in among.glob("iter_*"))) or "no iter_* folder"
    raise InputError(f"{path} isn't there; {among} has {there}")


def chosen(one: saved.Saved, pattern: str) -> saved.Saved:
    tensors = {name: tensor for name, tensor in one.tensors.items() if fnmatchcase(name, pattern)}
    if not tensors:
        names = ", ".join(list(one.tensors)[:SHOWN]) or "none"
        raise InputError(f"{one.folder} has no tensor like {pattern!r}; its first are {names}")
    return dataclasses.replace(one, tensors=tensors)


def lines(one: saved.Saved, found: dict[str, saved.Values]) -> list[str]:
    rows = [("tensor", "type", "shape", "pieces", "size", *(("norm", "largest", "not finite") if found else ()))]
    for tensor in one.tensors.values():
        more = found.get(tensor.name)
        numbers = (f"{more.norm:.6g}", f"{more.largest:.6g}", str(more.not_finite or "")) if more else ()
        size = formats.size(tensor.bytes)
        rows.append((tensor.name, tensor.dtype, shape(tensor), str(len(tensor.pieces)), size, *numbers))
    return [*head(one), *formats.aligned(rows)]


def head(one: saved.Saved) -> list[str]:
    weights, state = one.numbers(of_optimizer=False), one.numbers(of_optimizer=True)
    said = [
        f"{formats.counted(len(one.tensors), 'tensor')}: {weights:,} numbers"
        + (f", and {state:,} of the optimizer" if state else "")
    ]
    if one.objects:
        said.append(
            "1 object that isn't a tensor" if one.objects == 1 else f"{one.objects:,} objects that aren't tensors"
        )
    files = f"{formats.counted(len(one.files), 'file')}, {formats.size(sum(one.files.values()))}"
    if one.writers:
        files += f", written by {one.writers} ranks" if one.writers > 1 else ", written by one rank"
    sizes = " ".join(f"{name}={size}" for name, size in (one.layout or {}).items())
    trained = f"iteration {one.iteration}, " if one.iteration is not None else ""
    layout = f", layout {sizes}" if sizes else ""
    return [one.folder, f"  {trained}{one.format}{layout}", f"  {'; '.join(said)}", f"  {files}"]


def compared(one: saved.Saved, other: saved.Saved, found: dict[str, saved.Difference], read: bool) -> list[str]:
    """What differs, and how many tensors don't."""
    text = [*head(one), *head(other)]
    for here, there in ((one, other), (other, one)):
        if lacking := [name for name in here.tensors if name not in there.tensors]:
            text.append(f"only in {here.folder}: {formats.counted(len(lacking), 'tensor')}")
            text += [f"  {name}" for name in lacking]
    if changed := [difference for difference in found.values() if difference.differs]:
        rows = [("tensor", "differs", *(("unequal", "relative", "largest") if read else ()))]
        rows += [_difference(one.tensors[difference.name], difference) for difference in changed]
        text += formats.aligned(rows)
    same = len(found) - len(changed)
    how = "have equal numbers" if read else "have the same shape and type; --norms compares their numbers"
    return [*text, f"{same:,} of {len(found):,} common tensors {how}"]


def _difference(tensor: saved.Tensor, difference: saved.Difference) -> tuple[str, ...]:
    row = (tensor.name, difference.kinds or "")
    if difference.unequal is None:
        return row
    return (
        *row,
        f"{difference.unequal:,} of {tensor.numbers:,}",
        f"{difference.relative:.3g}",
        f"{difference.largest:.3g}",
    )


def shape(tensor: saved.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"
