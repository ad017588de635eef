"""The calibration of a GPU: the experiment's own, as written by `megaboa calibrate`, or else the shipped one."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megaboa import peaks, records
from megaboa.errors import InputError
from megaboa.peaks import Gpu
from megaboa.records import Calibration, HeldBack, Law, RecordError

FOLDER = Path("calibrations")  # in the user's working directory
SHIPPED = Path(__file__).parent / "calibrations"
# Used if only GPUs of one node were measured: 400 Gbit/s each, of which collectives reach four fifths.
NETWORK = Law(rate=40e9, latency=30e-6)
LOW_TYPES = {  # part of a precision's name -> type in a calibration, and speed relative to bf16 if it wasn't measured
    "fp8_current": ("fp8_current", 1.5),
    "fp8_delayed": ("fp8_delayed", 1.6),
    "subchannel": ("fp8_blocks", 1.4),
    "mxfp8": ("mxfp8", 1.5),
    "fp4": ("nvfp4", 2.0),
}
BY_TYPE = ("products", "grouped", "attention", "attention_fp8")  # have a law for each type
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def of(gpu: str | None) -> Calibration | None:
    """The calibration of a GPU named as in resources.gpu, such as h100-80g; None if nothing is known about it."""
    kind = (gpu or "").split("-")[0]
    known = peaks.of(gpu)
    folders = (FOLDER,) if known and known.like else (FOLDER, SHIPPED)  # an a100-40g isn't the shipped a100-80g
    for path in (folder / f"{kind}.json" for folder in folders):
        if path.exists():
            return _read(path, kind, path.stat().st_mtime_ns)
    return _scaled(known) if known else None


def name(gpu: str | None) -> str:
    found = of(gpu)
    return found.name if found else "none"


def low_type(precision: str | None) -> tuple[str, float] | None:
    """The type of products with fewer than 16 bits, and how much faster than bf16 it is taken for if it wasn't
    measured."""
    return next((found for part, found in LOW_TYPES.items() if part in (precision or "")), None)


def short(gpu: str | None, is_uncertain: bool, nodes: int = 1, precision: str | None = None) -> str:
    """Name of the calibration, with its median error for such runs among those that it wasn't fitted to
    (`speed.is_uncertain`)."""
    found = of(gpu)
    held = found and (found.held_back_by_host if is_uncertain else found.held_back)
    assumed = assumed_type(found, precision)
    error = f"off by {held.median:.0%}" if held and not assumed else "never checked"
    network = ", network assumed" if assumed_network(found, nodes) else ""
    return f"{name(gpu)} ({error}{f' in {assumed[0]}' if assumed else ''}{network})"


def assumed_type(found: Calibration | None, precision: str | None) -> tuple[str, float] | None:
    """A precision's type and its assumed speed relative to bf16, if the calibration has no law for its products."""
    low = low_type(precision)
    return low if found and low and low[0] not in found.products else None


def assumed_network(found: Calibration | None, nodes: int) -> float | None:
    """Bytes per second and GPU between nodes, if a run has several and collectives between them weren't measured."""
    law = found.network.all_reduce if found and found.network else NETWORK
    return law.rate if nodes > 1 and not law.points else None


def told(gpu: str | None, nodes: int = 1, precision: str | None = None) -> str:
    """The calibration with its errors for all kinds of runs."""
    found = of(gpu)
    if found is None:
        return f"no calibration of {gpu}"
    errors = []
    if found.held_back:
        errors.append(_errors(found.held_back))
    if found.held_back_by_host:
        errors.append(f"{_errors(found.held_back_by_host)} of experts or that wait for the host")
    if low := assumed_type(found, precision):
        errors = [
            f"never held against runs in {low[0]}, for which products {low[1]:g} times as fast as bf16 are assumed"
        ]
    network = assumed_network(found, nodes)
    assumed = f"; between nodes {network / 1e9:.0f} GB/s per GPU are assumed, not measured" if network else ""
    return f"{found.name}; {'; '.join(errors) or 'never held against runs'}{assumed}"


def _errors(held: HeldBack) -> str:
    return f"off by {held.median:.0%}, at most {held.worst:.0%}, in {held.rows} other runs"


@functools.cache
def _read(path: Path, kind: str, _changed: int) -> Calibration:
    try:
        found = records.parse(Calibration, json.loads(path.read_text(encoding="utf-8")), path)
        problem = _problem(found, kind)
    except RecordError:  # has the remedy
        raise
    except (ValueError, IsADirectoryError) as error:  # no JSON
        problem = str(error)
    if problem:
        raise InputError(f"{path}: is not a calibration of {kind} ({problem}): {Calibration.REMEDY}")
    return found


def _problem(found: Calibration, kind: str) -> str | None:
    """What would make its predictions wrong, or impossible."""
    if found.gpu != kind:
        return f"gpu is {found.gpu}"
    first = "fp32" if kind == "cpu" else "bf16"
    lacking = [name for name in ("products", "layer") if first not in getattr(found, name)]
    if lacking:
        return f"{lacking[0]} lacks {first}"
    for what, laws in (("attention", found.attention), ("attention_fp8", found.attention_fp8)):
        if (missing := {"forward", "backward"} - laws.keys()) and (laws or what == "attention"):
            return f"{what} lacks {' and '.join(sorted(missing))}"
    rates: dict[str, float] = {"node.ranks": found.node.ranks}
    if found.network:
        rates["network.ranks"] = found.network.ranks
    seconds = {"launch": found.launch, "tensor_host": found.tensor_host, "micro_batch": found.micro_batch}
    seconds |= {f"layer.{name}": value for name, value in found.layer.items()}
    for name, law in _laws(found):
        rates |= {f"{name}.rate": law.rate} | ({} if law.moved is None else {f"{name}.moved": law.moved})
        seconds |= {f"{name}.latency": law.latency, f"{name}.group": law.group}
    errors: dict[str, float] = {}
    for name in ("held_back", "held_back_by_host"):
        if held := getattr(found, name):
            errors |= {f"{name}.{key}": getattr(held, key) for key in ("rows", "median", "worst")}
    for name, value in (rates | seconds | errors).items():
        is_number = type(value) in (int, float) and math.isfinite(value)  # a bool is an int, too
        if not is_number or value < 0 or (value == 0 and name in rates):
            return f"{name} is {value!r}"
    return None


def _laws(found: Calibration) -> Iterator[tuple[str, Law]]:
    for what in BY_TYPE:
        yield from ((f"{what}.{name}", law) for name, law in getattr(found, what).items())
    yield "memory", found.memory
    if found.experts_host:
        yield "experts_host", found.experts_host
    for what, link in (("node", found.node), ("network", found.network)):
        if link:
            yield from ((f"{what}.{name}", getattr(link, name)) for name in COLLECTIVES)


@functools.cache
def _scaled(gpu: Gpu) -> Calibration:
    """Calibration of the nearest measured GPU, scaled by the data sheets' operations per second, memory and links. The
    host and the network between nodes stay the same."""
    measured = peaks.BY_KIND[str(gpu.like)]
    known = records.read(Calibration, SHIPPED / f"{measured.kind}.json")
    operations, moved = gpu.tflops / measured.tflops, gpu.bandwidth / measured.bandwidth
    sent = gpu.links.rate / measured.links.rate

    def products(laws: dict[str, Law]) -> dict[str, Law]:
        return {name: _faster(law, operations, moved) for name, law in laws.items()}

    to = gpu.example if gpu.kind == measured.kind else gpu.kind
    links = {name: _faster(getattr(known.node, name), sent) for name in COLLECTIVES}
    return replace(
        known,
        name=f"{measured.kind}'s, scaled to {to} by data sheets (operations, memory, {gpu.links.name})",
        gpu=gpu.kind,
        products=products(known.products),
        grouped=products(known.grouped),
        # What scores cost is exponentials, not bytes.
        attention={name: _faster(law, operations, operations) for name, law in known.attention.items()},
        attention_fp8={name: _faster(law, operations, operations) for name, law in known.attention_fp8.items()},
        memory=_faster(known.memory, moved),
        node=replace(known.node, **links),
        held_back=None,
        held_back_by_host=None,
    )


def _faster(law: Law, rate: float, moved: float = 1.0) -> Law:
    return replace(law, rate=law.rate * rate, moved=law.moved and law.moved * moved)
