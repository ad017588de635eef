"""The step lines of each program: Megatron-LM and Megatron-Bridge, Megatron-DeepSpeed, NeMo 2 and 1, torchtitan.

A number is accepted only if the line shows that it is complete: by the bar behind it, by its unit, or, for the last one
of a line, by the line feed.
"""

from __future__ import annotations

import functools
import re
from array import array

from megaboa.observe.logs.events import Event, LineFormat, Note, Steps

# Megatron-LM, Megatron-DeepSpeed and NeMo 2, whose lines are alike, and Megatron-Bridge.
_NUMBER = rb"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|(?i:nan|inf))"
_IS_NUMBER = re.compile(_NUMBER)
START = re.compile(rb"Starting training loop|the start of training|Training starts at")
HEADER = re.compile(rb"iteration +(\d{1,15})/ *(\d{1,15}) *\|")
_FIELD = re.compile(rb"\s*(\S[^|]*?) *: *(" + _NUMBER + rb")\s*")
_SPEED = re.compile(rb"Step Time *: *([\d.]+)s +GPU utilization: *([\d.]+) *(?:MODEL_)?TFLOP/s/GPU")
_VALIDATION = re.compile(rb"validation loss at ([^|]*?) *\|(.*)\|")
_AT_STEP = re.compile(rb"iteration (\d+)")
_MEMORY = re.compile(rb"\[Rank (\d+)\] \(after (\d+) iterations\) memory \((MB|GB)\) \|(.*)")
_PARAMETERS = re.compile(rb"Total number of parameters in billions: (\d+\.\d+)\s*$")
_ON_RANK = re.compile(rb"number of parameters on \([^)]*\)[^(]*\(([\d, ]+)\): *(\d+)\s*$")
_SETTING = re.compile(rb"\W*(?:\d+: *)?(seq_length) *(?:\.{2,}|:) *(\d+)\s*$")
_STRAGGLERS = re.compile(rb"MnRtt/Rnk: *(\d+\.\d+)ms/(\d+) *\| *MxRtt/Rnk: *(\d+\.\d+)ms/(\d+) *\|")
_SAVED = re.compile(rb"successfully saved checkpoint from iteration +(\d+)")
# The last field of Megatron-LM's own lines. Text after it comes from another rank.
_LAST = b"number of nan iterations"
# The last fields of NeMo 2's lines, which have no bar behind them.
_NEMO_ENDS = re.compile(
    rb" ?(?:train_step_timing in s|consumed_samples|reduced_train_loss|TFLOPS_per_GPU|tokens_per_sec_per_gpu|val_loss"
    rb"|val_ppl): " + _NUMBER + rb"\s*"
)
# A torn line may continue with another one that has bars.
_FOREIGN = re.compile(rb"validation loss at|memory \((?:MB|GB)\)")
_BYTES = {b"MB": 2**20, b"GB": 1e9}
# Maps the printed name of a peak to our name and the printed name of the current use.
_PEAKS = {
    "max allocated": ("allocated", "allocated"),
    "max reserved": ("reserved", "reserved"),
    "mem-max-allocated-gigabytes": ("allocated", "mem-allocated-gigabytes"),
    "mem-max-reserved-gigabytes": ("reserved", "mem-reserved-gigabytes"),
}

# Bridge's line on the first rank, which doesn't name the step.
SPEED = LineFormat("bridge", ("elapsed time per iteration (s)", "throughput per GPU (TFLOP/s/GPU)"), numbered=False)
SPEED_LINES = re.compile(rb"\nStep Time : (\d+\.\d+)s GPU utilization: (\d+\.\d+)MODEL_TFLOP/s/GPU\r?(?=\n)")


def read_iteration(line: bytes) -> Event | None:
    """Parse a line with the word iteration."""
    return _step(line) or _validation(line) or _memory(line) or _saved(line)


def read_speed(line: bytes) -> Event | None:
    found = _SPEED.search(line)
    if not found or not all(map(_IS_NUMBER.fullmatch, found.groups())):
        return None
    return Steps(SPEED, array("d", [0, 0, *map(float, found.groups())]), rank_of(line))


@functools.lru_cache(maxsize=1000)
def lines_of(layout: LineFormat, label: bytes) -> re.Pattern[bytes]:
    """A pattern for the complete lines of a layout and a label, between line feeds. Its groups are the numbers."""
    fields = b"".join(
        rb"[ \t]*" + re.escape(name.encode()) + rb" *: *([-+.\deEnNaAiIfF]+) *\|" for name in layout.names
    )
    begin = rb"\n" + re.escape(label) + rb"[ \t]*(?:\[[-\d :.,]+\] *)?"
    return re.compile(begin + rb"iteration +(\d{1,15})/ *(\d{1,15}) *\|" + fields + rb"[ \t\r]*(?=\n)")


def read_parameters(line: bytes) -> Event | None:
    if found := _PARAMETERS.search(line):
        return Note("parameters", {"total": float(found[1]) * 1e9, "digits": "billions"}, rank_of(line))
    if found := _ON_RANK.search(line):
        return Note("parameters", {"place": found[1].decode(), "count": int(found[2])}, rank_of(line))
    return None


def read_setting(line: bytes) -> Event | None:
    """The settings of a run's configuration that a summary needs."""
    found = _SETTING.match(line)
    return Note("setting", {found[1].decode(): int(found[2])}, rank_of(line)) if found else None


def read_start(line: bytes) -> Event | None:
    return Note("start", {}, rank_of(line)) if START.search(line) else None


def read_stragglers(line: bytes) -> Event | None:
    """A report of Megatron's straggler detector on its last steps: the times of the fastest and the slowest rank."""
    found = _STRAGGLERS.search(line)
    if not found:
        return None
    fastest, slowest = float(found[1]), float(found[3])
    return Note("stragglers", {"fastest_ms": fastest, "slowest_ms": slowest, "slowest_rank": found[4].decode()})


def _step(line: bytes) -> Event | None:
    headers = list(HEADER.finditer(line))
    if not headers:
        return None
    # A torn line is followed by the next one without a line feed; only the last is complete.
    header = headers[-1]
    begin = line.rfind(b"|", 0, header.start()) + 1
    *closed, tail = line[header.end() :].split(b"|")
    nemo = any(segment.lstrip().startswith(b"global_step:") for segment in closed)
    if nemo and _NEMO_ENDS.fullmatch(tail):
        closed.append(tail)
    elif _FOREIGN.search(line, header.end()):
        return Note("torn")
    if not nemo and tail.strip() and not any(_LAST in segment for segment in closed):
        return Note("torn")
    pairs = [found.groups() for segment in closed if (found := _FIELD.fullmatch(segment))]
    names = tuple(name.decode(errors="replace") for name, _ in pairs)
    if not pairs or len(set(names)) < len(names):
        return Note("torn")
    numbers = array("d", map(float, [*header.groups(), *(number for _, number in pairs)]))
    label, rank = label_of(line[begin:])
    layout = LineFormat("nemo" if nemo else "megatron", names, zero_based=nemo)
    return Steps(layout, numbers, rank, label)


def _validation(line: bytes) -> Event | None:
    found = _VALIDATION.search(line)
    if not found:
        return None
    pairs = [pair.groups() for segment in found[2].split(b"|") if (pair := _FIELD.fullmatch(segment))]
    losses = {
        name.decode(errors="replace").removesuffix(" value"): float(number)
        for name, number in pairs
        if name.endswith(b" value")
    }
    at = _AT_STEP.match(found[1])
    values = {"step": int(at[1]) if at else None, "at": found[1].decode(errors="replace"), "losses": losses}
    return Note("validation", values, rank_of(line)) if losses else None


def _memory(line: bytes) -> Event | None:
    found = _MEMORY.search(line)
    if not found:
        return None
    pairs = [pair.groups() for segment in found[4].split(b"|") if (pair := _FIELD.fullmatch(segment))]
    printed = {name.decode(errors="replace"): float(number) for name, number in pairs}
    whole = {
        ours: printed[name] * _BYTES[found[3]]
        for name, (ours, now) in _PEAKS.items()
        # A peak below the current use is a torn number.
        if name in printed and printed[name] >= printed.get(now, 0.0)
    }
    return Note("memory", whole, found[1].decode()) if whole else None


def _saved(line: bytes) -> Event | None:
    found = _SAVED.search(line)
    return Note("saved", {"step": int(found[1])}, rank_of(line)) if found else None


# torchtitan, and the progress bar of NeMo 1.
_PLAIN_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|(?i:nan|inf))"
_LAST_STEP = 1e15
_TITAN_STEP = re.compile(rb"(validate )?step: *(\d[\d,]{0,14}) +(?=[a-z_]+: )")
_TITAN_FIELD = re.compile((r"([a-z_]+): *(" + _PLAIN_NUMBER + r")(?:GiB\([\d.]+%\)|%)?(?=\s|$)").encode())
# The last field of a training line; a line without it is torn.
_TITAN_END = re.compile(rb"\bmfu: *(?:[\d.]+%|N/A)\s*$")
_TITAN_SETTINGS = re.compile(rb"global batch size (\d+), .*\bsequence length (\d+),")
_TITAN_SIZE = re.compile(rb"size: ([\d,]+) total parameters")
_BAR = re.compile(rb"\[([^\]\[]*\bglobal_step=[^\]\[]*)\]")
_STEP = re.compile(rb"\bglobal_step=([^,\]]*)")
_BAR_FIELD = re.compile((r"([^=,]+)=(" + _PLAIN_NUMBER + r")").encode())


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
    """NeMo 1 redraws its progress bar on one line, of which only the last state counts."""
    found = _BAR.findall(line)
    if not found:
        return None
    pairs = {name.strip().decode(errors="replace"): _plain(number) for name, number in _pairs(found[-1])}
    if "global_step" not in pairs:
        return None
    # The fields before `global_step` are the bar's own, and `loss` is a mean over the last steps.
    fields = {name: number for name, number in pairs.items() if name not in ("global_step", "loss", "v_num")}
    # Rounded numbers are unusable: 2e+3 is a step between 1950 and 2050.
    if b"e" in _STEP.findall(found[-1])[-1] or pairs["global_step"] > _LAST_STEP or not fields:
        return None
    numbers = array("d", [pairs["global_step"], 0.0, *fields.values()])
    return Steps(LineFormat("nemo-bar", tuple(fields), zero_based=True), numbers, rank_of(line))


def _pairs(text: bytes) -> list[tuple[bytes, bytes]]:
    return [found.groups() for part in text.split(b", ") if (found := _BAR_FIELD.fullmatch(part))]


def _plain(number: bytes) -> float:
    return float(number.replace(b",", b""))


# The rank of a line, if lines of several ranks are labelled: a time, then one or several labels of torchrun, of a
# launcher's --label, or of NeMo-Run (`task/0`).
_TIME = rb"\s*(?:\[\d{4}-[^\]]*\] )?"
_ONE = rb"(?:\[(?:rank|default)(\d+)\]:?|(\d+):(?=\s)|[^\s|\[/]+/(\d+)(?= ))"
_LABEL = re.compile(_TIME + _ONE + rb"(?:\s*" + _ONE + rb")?")


def label_of(line: bytes) -> tuple[bytes, str | None]:
    """The label at the beginning of a line, and its rank; `1/0` if a node and a rank are named."""
    found = _LABEL.match(line)
    if not found:
        return b"", None
    return found[0], b"/".join(filter(None, found.groups())).decode()


def rank_of(line: bytes) -> str | None:
    return label_of(line)[1]
