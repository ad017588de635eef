"""The lines of torchtitan, and NeMo 1's progress bar."""

from __future__ import annotations

import re
from array import array

from megaboa.observe.logs.events import Event, LineFormat, Note, Steps
from megaboa.observe.logs.ranks import rank_of

_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|(?i:nan|inf))"
_LAST_STEP = 1e15
_TITAN_STEP = re.compile(rb"(validate )?step: *(\d[\d,]{0,14}) +(?=[a-z_]+: )")
_TITAN_FIELD = re.compile((r"([a-z_]+): *(" + _NUMBER + r")(?:GiB\([\d.]+%\)|%)?(?=\s|$)").encode())
# The last field of a training line: where it is missing, the line was torn.
_TITAN_END = re.compile(rb"\bmfu: *(?:[\d.]+%|N/A)\s*$")
_TITAN_SETTINGS = re.compile(rb"global batch size (\d+), .*\bsequence length (\d+),")
_TITAN_SIZE = re.compile(rb"size: ([\d,]+) total parameters")
_BAR = re.compile(rb"\[([^\]\[]*\bglobal_step=[^\]\[]*)\]")
_STEP = re.compile(rb"\bglobal_step=([^,\]]*)")
_BAR_FIELD = re.compile((r"([^=,]+)=(" + _NUMBER + r")").encode())


def read_torchtitan(line: bytes) -> Event | None:
    begins = list(_TITAN_STEP.finditer(line))
    if not begins:
        return None
    begin = begins[-1]
    text = line[begin.end() :]
    pairs = [(name.decode(), _plain(number)) for name, number in _TITAN_FIELD.findall(text)]
    if begin[1]:
        losses = {name: number for name, number in pairs if name == "loss"}
        return Note("validation", {"step": int(_plain(begin[2])), "at": "validate", "losses": losses}, rank_of(line))
    if not _TITAN_END.search(text):
        return Note("torn")
    names = tuple(name for name, _ in pairs)
    if len(set(names)) < len(names):
        return Note("torn")
    numbers = array("d", [_plain(begin[2]), 0.0, *(number for _, number in pairs)])
    return Steps(LineFormat("torchtitan", names), numbers, rank_of(line))


def read_torchtitan_size(line: bytes) -> Event | None:
    found = _TITAN_SIZE.search(line)
    return Note("parameters", {"total": _plain(found[1]), "digits": "all"}, rank_of(line)) if found else None


def read_torchtitan_settings(line: bytes) -> Event | None:
    found = _TITAN_SETTINGS.search(line)
    values = found and {"global_batch_size": int(found[1]), "seq_length": int(found[2])}
    return Note("setting", values, rank_of(line)) if values else None


def read_progress_bar(line: bytes) -> Event | None:
    """NeMo 1: the bar is drawn again and again on one line; its last state counts."""
    found = _BAR.findall(line)
    if not found:
        return None
    pairs = {name.strip().decode(errors="replace"): _plain(number) for name, number in _pairs(found[-1])}
    if "global_step" not in pairs:
        return None
    # The fields before its own are of the bar, and `loss` is the mean over the last steps.
    fields = {name: number for name, number in pairs.items() if name not in ("global_step", "loss", "v_num")}
    # 2e+3 is a step between 1950 and 2050.
    if b"e" in _STEP.findall(found[-1])[-1] or pairs["global_step"] > _LAST_STEP or not fields:
        return None
    numbers = array("d", [pairs["global_step"], 0.0, *fields.values()])
    return Steps(LineFormat("nemo-bar", tuple(fields), zero_based=True), numbers, rank_of(line))


def _pairs(text: bytes) -> list[tuple[bytes, bytes]]:
    return [found.groups() for part in text.split(b", ") if (found := _BAR_FIELD.fullmatch(part))]


def _plain(number: bytes) -> float:
    return float(number.replace(b",", b""))
