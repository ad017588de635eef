"""Problems of an experiment file, which are all reported at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megaboa.errors import InputError


@dataclass(frozen=True)
class Problem:
    """One mistake: its place (file, line, dotted key), and what is allowed there."""

    key: str
    message: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line) if part is not None)
        return ": ".join(part for part in (place, self.key, self.message) if part)


class ConfigError(InputError):
    """Every problem of a configuration; its text is the complete message for the user."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = list(dict.fromkeys(problems))
        count = len(self.problems)
        head = "1 problem in the configuration:" if count == 1 else f"{count} problems in the configuration:"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


def show(value: Any) -> str:
    """A value as it would be written in the file, shortened."""
    words = {True: "true", False: "false", None: "null"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option that was probably meant, if there is one."""
    options = list(options)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    if not close:  # the same word in another case, or one part of a dotted key
        folded = word.casefold()
        close = [o for o in options if folded in (o.casefold(), o.casefold().rpartition(".")[2])]
    return close[0] if close else None


def some_nearest(word: str, options: Iterable[str]) -> list[str]:
    """The options, at most three, that may have been meant, the nearest first; also those with a word in common."""
    options = list(options)
    if meant := nearest(word, options):
        return [meant]
    words = _words(word)
    alike = [option for option in options if words & _words(option)]
    alike.sort(key=lambda option: -difflib.SequenceMatcher(None, word, option).ratio())
    return list(dict.fromkeys([*alike, *difflib.get_close_matches(word, options, cutoff=0.5)]))[:3]


def _words(name: str) -> set[str]:
    return set(re.split(r"[._/]", name.casefold()))


def no_value(column: str, wanted: Iterable[str], there: Iterable[str]) -> str:
    """A message such as 'no run has model x; there are dense, moe', with the values if they fit on a line."""
    known = ", ".join(there)
    return f"no run has {column} {' or '.join(wanted)}{f'; there are {known}' if len(known) <= 160 else ''}"


def choose(word: str, options: Iterable[str], what: str) -> str:
    """A message such as 'there is no ...; did you mean ...?', with the options if they fit on a line."""
    options = list(options)
    hint = nearest(word, options)
    text = f"there is no {what} {word!r}"
    if hint:
        text += f"; did you mean {hint!r}?"
    listed = ", ".join(options)
    several = "corpora" if what == "corpus" else f"{what}s"
    if not options:
        text += f"; no {what} is defined"
    elif len(listed) <= 160:
        text += f" ({several}: {listed})" if hint else f"; {several}: {listed}"
    return text
