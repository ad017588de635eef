"""Contents of a checkpoint: its tensors, from the index alone, and their values, one stored piece at a time.

Supports torch's distributed checkpoints (`torch_dist`, as written by Megatron and Bridge) and Hugging Face's
safetensors folders. Reading the index only needs the standard library, and executes nothing in the file, which is a
pickle and may come from anybody. Reading values needs torch.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaboa.bridge import weights
from megaboa.errors import InputError
from megaboa.layout import AXES
from megaboa.run import checkpoints

if TYPE_CHECKING:
    import torch

INDEX, CONFIG = ".metadata", checkpoints.LAST_WRITTEN
TORCH_DIST, SAFETENSORS = "torch_dist", "safetensors"
AGAIN = "copy or download it again"
OF_OPTIMIZER = "optimizer."  # prefix of its tensors' names
NUMBERS_AT_ONCE = 1 << 22  # converted to float64 for a norm at a time
_ITERATION = re.compile(r"^(?:damaged_)?iter_(\d+)")
_WRITER = re.compile(r"^__(\d+)_\d+\.distcp$")
# torch's names for safetensors' types
TYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{f"{short}{bits}": f"{long}{bits}" for short, long in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
}
_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, as one rank wrote it: its place in the tensor, and its place in a file."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        bits = _BITS.search(self.dtype)
        return self.numbers * (int(bits[0]) // 8 if bits else 1)


@dataclass(frozen=True)
class Saved:
    """A checkpoint's index. `objects`: entries that aren't tensors. `layout`: sizes of the axes, if known."""

    folder: str
    format: str
    iteration: int | None
    layout: dict[str, int] | None
    writers: int | None  # ranks
    files: dict[str, int]  # bytes
    objects: int
    tensors: dict[str, Tensor]

    def numbers(self, of_optimizer: bool) -> int:
        chosen = (one for one in self.tensors.values() if one.name.startswith(OF_OPTIMIZER) == of_optimizer)
        return sum(one.numbers for one in chosen)


@dataclass(frozen=True)
class Values:
    """Statistics of a tensor: L2 norm and largest magnitude of its finite values, and the number of NaN or infinite
    values."""

    norm: float
    largest: float
    not_finite: int


@dataclass(frozen=True)
class Difference:
    """Differences between two tensors of the same name; values only if they were read."""

    name: str
    kinds: str | None = None  # shapes or types
    unequal: int | None = None  # number of different values; None: not read
    relative: float | None = None  # norm of the difference, relative to the norm of the first
    largest: float | None = None

    @property
    def differs(self) -> bool:
        return bool(self.kinds or self.unequal)


def look(folder: Path) -> Saved:
    """Open a checkpoint. Raises InputError, which describes the folder, if it isn't a complete checkpoint."""
    if (folder / INDEX).is_file():
        return _torch_dist(folder)
    if _safetensors_files(folder):
        return _safetensors(folder)
    raise InputError(f"{folder} {_what_it_is(folder)}")


def values(saved: Saved, tensor: Tensor) -> Values:
    """Statistics of a tensor's values, with one piece in memory at a time."""
    squares, largest, not_finite = 0.0, 0.0, 0
    for piece in tensor.pieces:
        for numbers in _doubles(_read(saved, tensor, piece)):
            finite = numbers.isfinite()
            not_finite += int((~finite).sum())
            numbers = numbers[finite].abs()
            squares += float((numbers * numbers).sum())
            largest = max(largest, float(numbers.max()) if len(numbers) else 0.0)
    return Values(math.sqrt(squares), largest, not_finite)


def compare(one: Saved, other: Saved, name: str, read: bool) -> Difference:
    """Compare a tensor of two checkpoints, whose pieces may be cut differently. Only one piece of each is in memory."""
    mine, theirs = one.tensors[name], other.tensors[name]
    kinds = [f"{what} {a}, {b}" for what, a, b in _kinds(mine, theirs) if a != b]
    if not read or mine.shape != theirs.shape:
        return Difference(name, "; ".join(kinds) or None)
    import torch

    unequal, squares, norm, largest, held = 0, 0.0, 0.0, 0.0, (None, torch.empty(0))
    for piece in mine.pieces:
        here = _read(one, mine, piece)
        for part in theirs.pieces:
            box = _overlap(piece, part)
            if box is None:
                continue
            if held[0] != part:
                held = (part, _read(other, theirs, part))
            pair = here[_within(box, piece)], held[1][_within(box, part)]
            for a, b in zip(*map(_doubles, pair), strict=True):
                same = (a == b) | (a.isnan() & b.isnan())
                unequal += int((~same).sum())
                apart = torch.where(same, 0.0, a - b)
                squares, norm = squares + float((apart * apart).sum()), norm + float((a * a).sum())
                largest = max(largest, float(apart.abs().max()))
    relative = math.sqrt(squares) / math.sqrt(norm) if norm else (math.inf if squares else 0.0)
    return Difference(name, "; ".join(kinds) or None, unequal, relative, largest)


def _kinds(one: Tensor, other: Tensor) -> list[tuple[str, Any, Any]]:
    return [("shape", list(one.shape), list(other.shape)), ("type", one.dtype, other.dtype)]


def _torch_dist(folder: Path) -> Saved:
    try:
        with (folder / INDEX).open("rb") as stream:
            index = _Inert(stream).load()
        described = {str(name): vars(kind) for name, kind in index.state_dict_metadata.items()}
        stored = [(vars(place), vars(at)) for place, at in index.storage_data.items()]
        tensors, objects = _tensors(described, stored), sum("size" not in kind for kind in described.values())
    except Exception as error:  # reading a damaged pickle may raise anything
        raise InputError(f"{folder / INDEX} can't be read ({type(error).__name__}: {error}): {AGAIN}") from error
    ends: dict[str, int] = defaultdict(int)
    for _, at in stored:
        ends[at["relative_path"]] = max(ends[at["relative_path"]], at["offset"] + at["length"])
    for name, end in ends.items():
        _require_bytes(folder / name, end)
    number = _iteration(folder)
    named_so = number is not None and folder == checkpoints.folder(folder.parent, number)
    if named_so and (problem := checkpoints.damage(folder.parent, number, full=False)):
        raise InputError(f"{problem}: {AGAIN}")
    writers = {match[1] for match in map(_WRITER.match, ends) if match}
    return Saved(
        folder=str(folder),
        format=TORCH_DIST,
        iteration=number,
        layout=_layout(folder),
        writers=len(writers) or None,
        files={name: (folder / name).stat().st_size for name in sorted(ends)},
        objects=objects,
        tensors=tensors,
    )


def _tensors(described: dict[str, dict[str, Any]], stored: list[tuple[dict[str, Any], dict[str, Any]]]) -> Any:
    places: dict[str, dict[tuple[int, ...] | None, dict[str, Any]]] = defaultdict(dict)
    for place, at in stored:
        places[place["fqn"]][place.get("offset")] = at
    found = {}
    for name, kind in sorted(described.items()):
        if "size" not in kind:
            continue
        pieces = []
        for chunk in map(vars, kind["chunks"]):
            at = places[name].get(chunk["offsets"])
            if at is None:
                raise ValueError(f"no file holds {name} at {list(chunk['offsets'])}")
            if at.get("transform_descriptors"):
                raise ValueError(f"{name} is compressed ({', '.join(at['transform_descriptors'])})")
            pieces.append(Piece(chunk["offsets"], chunk["sizes"], at["relative_path"], at["offset"], at["length"]))
        found[name] = Tensor(name, kind["properties"].state[0], kind["size"], tuple(pieces))
    return found


def _safetensors(folder: Path) -> Saved:
    files, tensors = {}, {}
    for path in _safetensors_files(folder):
        _require_bytes(path, 8)
        header, begin = _header(path)
        end = begin
        for name, said in header.items():
            first, last = (begin + offset for offset in said["data_offsets"])
            shape, end = tuple(said["shape"]), max(end, last)
            piece = Piece((0,) * len(shape), shape, path.name, first, last - first)
            tensors[name] = Tensor(name, TYPES.get(said["dtype"], said["dtype"]), shape, (piece,))
        _require_bytes(path, end)
        files[path.name] = path.stat().st_size
    return Saved(str(folder), SAFETENSORS, None, None, None, files, 0, dict(sorted(tensors.items())))


def _safetensors_files(folder: Path) -> list[Path]:
    try:
        return weights.files(folder)
    except (ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{folder / weights.INDEX} can't be read ({error!r}): {AGAIN}") from error


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file, and the offset of their values."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            if size > path.stat().st_size:
                raise ValueError(f"its header should have {size:,} bytes")
            header = json.loads(stream.read(size))
            header.pop("__metadata__", None)
            return header, 8 + size
        except (ValueError, AttributeError) as error:
            raise InputError(f"{path} is damaged ({error}): {AGAIN}") from error


def _require_bytes(path: Path, least: int) -> None:
    if not path.exists():
        raise InputError(f"{path} is missing, and the checkpoint's index names it: {AGAIN}")
    if (size := path.stat().st_size) < least:
        raise InputError(f"{path} is truncated: it has {size:,} bytes, and needs {least:,}: {AGAIN}")


def _what_it_is(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    if any(name.endswith(".distcp") for name in names):
        return f"has no {INDEX}, which is written last: its save was interrupted, or only a part was copied"
    if any(name.startswith("mp_rank_") for name in names):
        how = "convert it with Megatron (--ckpt-convert-format torch_dist)"
        return f"is in Megatron's older format, a file for each rank: {how}"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return "has its weights in torch's own files: only torch_dist and safetensors are read"
    held = f"it holds {', '.join(names[:5])}" if names else "it is empty"
    return f"isn't a checkpoint: {held}; name a folder with {INDEX} or *.safetensors, a run, or one of its checkpoints"


def _iteration(folder: Path) -> int | None:
    match = _ITERATION.match(folder.resolve().name)
    return int(match[1]) if match else None


def _layout(folder: Path) -> dict[str, int] | None:
    """The layout in the configuration that Bridge writes into a checkpoint."""
    import yaml

    try:
        model = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))["model"]
        return {axis.name: size for axis in AXES if (size := model.get(axis.argument))}
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return None


def _read(saved: Saved, tensor: Tensor, piece: Piece) -> torch.Tensor:
    import torch

    path = Path(saved.folder, piece.file)
    with path.open("rb") as stream:
        stream.seek(piece.begin)
        data = bytearray(stream.read(piece.length))
    try:
        if saved.format == TORCH_DIST:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True).detach().reshape(piece.shape)
        if not data:
            return torch.empty(piece.shape)
        return torch.frombuffer(data, dtype=getattr(torch, tensor.dtype)).reshape(piece.shape)
    except Exception as error:
        why = type(error).__name__  # torch's own message recommends executing the file's contents
        raise InputError(f"{path} is damaged: {tensor.name} can't be read ({why}): {AGAIN}") from error


def _doubles(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.reshape(-1)
    for begin in range(0, len(flat), NUMBERS_AT_ONCE):
        yield flat[begin : begin + NUMBERS_AT_ONCE].double()


Box = tuple[tuple[int, int], ...]


def _overlap(one: Piece, other: Piece) -> Box | None:
    """The overlap of two pieces: begin and end in every dimension of the tensor."""
    both = zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    box = tuple((max(a, b), min(a + length, b + size)) for a, length, b, size in both)
    return box if all(first < end for first, end in box) else None


def _within(box: Box, piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(first - at, end - at) for (first, end), at in zip(box, piece.offsets, strict=True))


class _Inert(pickle.Unpickler):
    """Unpickler that calls nothing that a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            return tuple if name == "Size" else name  # types appear by name
        return _Thing


class _Thing(dict[Any, Any]):
    """Stand-in for any object: its attributes, or its state if that isn't a dictionary."""

    def __new__(cls, *_: object, **__: object) -> _Thing:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.state = state

    __eq__, __hash__ = object.__eq__, object.__hash__
