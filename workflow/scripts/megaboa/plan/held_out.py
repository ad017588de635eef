"""Which documents of a run's validation data its parents have not trained on.

A corpus that a parent trained on keeps the share that the parent's split held out, also where it has left the blend.
Where that share isn't there, or isn't known, validation on the corpus is refused, or warned of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from megaboa import records
from megaboa.blends import RECIPES, Blend, shares_of_splits, split_blends, validation_sets
from megaboa.config.models.data import Corpus, origins
from megaboa.data.sources import as_list, placed
from megaboa.files import canonical
from megaboa.plan.given_files import pairs_of
from megaboa.records import CorpusSpec, RunSpec, TextSpec, Tree, plain

# Fields of a corpus that decide which texts it has.
_OF_TEXTS = {one.name for one in fields(TextSpec)} - {"name"}
_OF_TEXTS |= {"pairs", "min_characters", "deduplicate", "filter", "messages", "prompt", "answer"}
TOO_GOOD = "may be validated on, so losses may look too good"

Key = tuple[str, ...]
ANOTHER = "name another corpus"


@dataclass(frozen=True)
class Problem:
    """What is wrong with a key, and the remedy."""

    key: Key
    fact: str
    remedy: str = ANOTHER
    mixes_shares: bool = False  # whether the corpora of a set are validated on by different splits

    @property
    def message(self) -> str:
        return f"{self.fact}: {self.remedy}"


@dataclass(frozen=True)
class Texts:
    """The texts of a corpus: equal ones are the same documents, and those that share a source have some in common."""

    sources: frozenset[str]
    selection: str

    @classmethod
    def of_spec(cls, spec: CorpusSpec) -> Texts:
        return cls._of(plain(spec))

    @classmethod
    def of(cls, corpus: Corpus) -> Texts:
        given = pairs_of(corpus)
        source = [pair.prefix for pair in given] if given else corpus.source or []
        return cls._of({**corpus.model_dump(), "source": source, "pairs": [plain(pair) for pair in given]})

    @classmethod
    def _of(cls, given: Tree) -> Texts:
        kept = {name: value for name, value in given.items() if name in _OF_TEXTS and value not in (None, [], ())}
        kept["source"] = [placed(one) for one in as_list(given["source"])]
        if given.get("filter"):
            kept["filter"] = placed(given["filter"])
        if given.get("pairs"):
            kept["pairs"] = [{**pair, "prefix": placed(pair["prefix"])} for pair in given["pairs"]]
        return cls(origins(kept), canonical(kept))


def is_made_of(made: records.Corpus, spec: CorpusSpec, trained: str | None) -> bool:
    """Whether a corpus with this manifest is the one that was trained on, and made as this specification says.
    `trained`: the digest of the one that was trained on, if it is known."""
    asked = plain(spec)
    sources = [[placed(one) for one in as_list(of.source)] for of in (spec, made)]
    decided = {key: value for key, value in made.identity.items() if key in _OF_TEXTS - {"filter"}}
    is_same = all(asked.get(key) == value for key, value in decided.items())
    return trained in (None, made.digest) and sources[0] == sources[1] and is_same


class TextsOfPlan:
    """The texts of a plan's corpora. Their files are looked for once, however many runs read them."""

    def __init__(self) -> None:
        self._known: dict[str, Texts] = {}

    def __call__(self, corpora: Mapping[str, Corpus], names: Iterable[str]) -> dict[str, Texts]:
        """By name, of those of these corpora that the experiment has."""
        return {name: self._of(corpora[name]) for name in names if name in corpora}

    def _of(self, corpus: Corpus) -> Texts:
        key = corpus.model_dump_json()
        if key not in self._known:
            self._known[key] = Texts.of(corpus)
        return self._known[key]


@dataclass(frozen=True)
class Ancestor:
    """A run from whose weights another one goes on, directly or through others: `<experiment>/<run>@<step>`."""

    name: str
    run: RunSpec
    step: int
    split: str | None  # None if only its recipe knows it
    texts: Mapping[str, Texts]  # of the corpora that it trained on, as far as they are known
    has_changed: bool = False  # whether one of them has other texts, or other content, since

    @property
    def is_known(self) -> bool:
        """Whether it is known which texts it trained on."""
        return not self.has_changed and _trained_on(self.run).keys() <= self.texts.keys()


@dataclass(frozen=True)
class Lineage:
    """The parents of a run, the nearest first. `lost`: the first one that isn't there any more, so that it and its own
    parents aren't known.

    Splits by corpus, for where it isn't known which texts were trained on: `inherited` are those that the parents have
    recorded, and `planned` those that the last plan found for the run itself, when more was known.
    """

    ancestors: Sequence[Ancestor]
    lost: str | None = None
    inherited: Mapping[str, str] = field(default_factory=dict)
    planned: Mapping[str, str] = field(default_factory=dict)

    @property
    def unknown(self) -> str | None:
        """The parent of which it isn't known which texts it trained on, if there is one."""
        if self.lost:
            return f"{self.lost}, whose record is gone,"
        return next((one.name for one in self.ancestors if not one.is_known), None)


@dataclass(frozen=True)
class HeldOut:
    """What a run validates on. `splits`: the parents' splits of corpora that the run no longer trains on; those that it
    has recorded are left out."""

    splits: dict[str, str]
    problems: list[Problem]
    warnings: list[str]

    @property
    def of_finished(self) -> Iterator[str]:
        """Warnings of a finished run, which can't be changed any more."""
        for one in self.problems:
            if not one.mixes_shares:  # of the corpora of a set `splits` says it
                yield f"{'.'.join(one.key)}: {one.fact}; the run is finished, so its losses look too good"
        for corpus, split in self.splits.items():
            yield (
                f"data.validation_sets: the run is finished, and was validated on all of {corpus!r}, also on what its "
                f"parents trained on (data.split: {split}), so its losses look too good"
            )


@dataclass(frozen=True)
class _TrainedOn:
    """A corpus that an ancestor trained on, and that has texts of one of the run's."""

    ancestor: Ancestor
    corpus: str
    is_same: bool

    @property
    def is_whole(self) -> bool:
        return not self.ancestor.run.data.get("blend")

    @property
    def is_certain(self) -> bool:
        return self.ancestor.is_known and (self.is_whole or self.ancestor.split is not None)

    @property
    def trained(self) -> float:
        """The share of the documents, from the first one on, that it trained on."""
        return 1.0 if self.is_whole or self.ancestor.split is None else shares_of_splits(self.ancestor.split)[0]

    def unusable(self, name: str) -> str | None:
        """Why a validation set can't have what this ancestor held out of the corpus; None if it can."""
        by = self.ancestor.name
        if not self.is_same:
            return f"names {name!r}, which has a source of {self.corpus!r}, and {by} trained on that"
        if self.is_whole:
            return f"names {name!r}, which {by} trained on in whole"
        if self.ancestor.split is None:
            return f"names {name!r}, which {by} trained on, by a split that only its recipe knows"
        return None

    @property
    def remedy(self) -> str:
        """What to do if it is unusable."""
        if not self.is_same or self.is_whole:
            return ANOTHER
        parent = self.ancestor.name.partition("@")[0]
        return f"set data.split in {parent}, call `snakemake preflight` for {parent} first, or {ANOTHER}"


def held_out(run: RunSpec, texts: Mapping[str, Texts], lineage: Lineage) -> HeldOut:
    """What a run with these parents validates on. `texts`: of its own corpora. What a finished run has held out
    (`run.held_out`) stays so, and is no problem."""
    data, problems, splits = run.data, [], {}
    trained = _trained_on(run)
    for name, blend in validation_sets(data).items():
        others = [corpus for corpus in blend if corpus not in trained]
        key = ("data", "validation_sets", name)
        found = {
            corpus: (None, run.held_out[corpus]) if corpus in run.held_out else _split_of(key, corpus, texts, lineage)
            for corpus in others
        }
        wrong = [problem for problem, _ in found.values() if problem]
        kept = {corpus: split for corpus, (_, split) in found.items()}
        if not wrong and len({*kept.values()}) > 1:
            wrong = [Problem(key, _mixes(kept), "make two sets of them", mixes_shares=True)]
        problems += wrong[:1]
        splits |= {corpus: split for corpus, split in kept.items() if split and corpus not in run.held_out}
    per_split = data.get("blend_per_split") or {}
    for split in ("valid", "test"):
        key = ("data", "blend_per_split", split)
        problem = _in_whole(key, per_split.get(split) or {}, texts, lineage, may_be_set=not run.is_tuned)
        problems += [problem] if problem else []
    return HeldOut(splits, problems, list(dict.fromkeys(_warnings(run, texts, lineage))))


def _trained_on(run: RunSpec) -> Blend:
    return split_blends(run.data).get("train", {})


def _reads(name: str, texts: Mapping[str, Texts], lineage: Lineage) -> Iterator[_TrainedOn]:
    """What the run's ancestors trained on of the texts of one of its corpora."""
    own = texts[name]
    for ancestor in lineage.ancestors:
        for corpus in _trained_on(ancestor.run):
            if (theirs := ancestor.texts.get(corpus)) and not own.sources.isdisjoint(theirs.sources):
                yield _TrainedOn(ancestor, corpus, own == theirs)


def _split_of(key: Key, name: str, texts: Mapping[str, Texts], lineage: Lineage) -> tuple[Problem | None, str | None]:
    """Why a corpus that the run doesn't train on can't be a validation set, and the split that decides which of its
    documents can be; neither if nobody trained on it."""
    reads = list(_reads(name, texts, lineage))
    if name in lineage.planned and (reads or lineage.unknown) and not any(one.is_certain for one in reads):
        return None, lineage.planned[name]
    if problem := next((Problem(key, fact, one.remedy) for one in reads if (fact := one.unusable(name))), None):
        return problem, None
    if not reads:
        return None, lineage.inherited.get(name) if lineage.unknown else None
    most = max(reads, key=lambda one: one.trained).ancestor
    if shares_of_splits(most.split)[1] == 0:
        fact = f"names {name!r}, of which {most.name} held out nothing for validation (data.split: {most.split})"
        return Problem(key, fact), None
    return None, most.split


def _mixes(kept: Mapping[str, str | None]) -> str:
    """`kept`: by corpus of a set the split that decides which documents it has."""
    one, *others = kept
    other = next(name for name in others if kept[name] != kept[one])
    of = {name: f"what a parent held out of it by {kept[name]}" if kept[name] else "all of it" for name in (one, other)}
    return f"mixes {one!r} ({of[one]}) with {other!r} ({of[other]})"


def _in_whole(key: Key, blend: Blend, texts: Mapping[str, Texts], lineage: Lineage, may_be_set: bool) -> Problem | None:
    """Why blend_per_split can't read these corpora for validation or the test: it reads them in whole."""
    for name in blend:
        for one in _reads(name, texts, lineage):
            fact = one.unusable(name)
            if fact or not may_be_set:
                return Problem(key, fact or f"names {name!r}, which {one.ancestor.name} trained on")
            return Problem(
                key,
                f"names {name!r}, which {one.ancestor.name} trained on, and reads all of it",
                f"{ANOTHER} here, and this one in data.validation_sets, where it is the share that was held out",
            )
    return None


def _warnings(run: RunSpec, texts: Mapping[str, Texts], lineage: Lineage) -> Iterator[str]:
    data, own = run.data, run.data.get("split")
    evaluated = [*validation_sets(data), *(name for name in ("valid", "test") if name in split_blends(data))]
    if data.get("blend") and own and shares_of_splits(own)[0] == 1:  # nothing is held out
        evaluated = [*validation_sets(data)]
    if evaluated and (who := lineage.unknown):
        yield f"continue_from: it isn't known which texts {who} trained on: documents that were trained on {TOO_GOOD}"
    for name in (data.get("blend") or {}) if evaluated else ():
        for one in _reads(name, texts, lineage):
            by = one.ancestor.name
            if not one.is_same:
                yield (
                    f"continue_from: {by} trained on {one.corpus!r}, which has a source of {name!r}: documents that "
                    f"were trained on {TOO_GOOD}"
                )
            elif one.is_whole:
                yield f"continue_from: {by} trained on {name!r} in whole: documents that were trained on {TOO_GOOD}"
            elif own is None and one.ancestor.run.data.get("split") is None:  # its recipe's, too
                continue
            elif own is None or shares_of_splits(own)[0] < one.trained:
                yield (
                    f"continue_from: data.split was {one.ancestor.split or RECIPES} in {by}, and is {own or RECIPES}: "
                    f"documents that were trained on {TOO_GOOD}"
                )
