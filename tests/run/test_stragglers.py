"""megaboa.run.stragglers: who is slow, who is told of, and when their nodes are left."""

import math
import types
from dataclasses import replace

import pytest

from megaboa import records
from megaboa.config.models.resources import Recovery
from megaboa.files import append_line
from megaboa.records import AttemptEnd, Pace, line, parse, read_node_troubles, read_paces
from megaboa.run import node_memory, stragglers
from megaboa.run.stragglers import Stragglers, find, scores, to_replace
from megaboa.store_paths import AttemptFolder, RunStore

SETTINGS = parse(records.Recovery, Recovery().model_dump(mode="json"), "a test")
EVEN, SLOW = (0.04, 0.041, 0.039, 0.04), (0.04, 0.041, 0.039, 0.08)


def paces(*seconds):
    return [Pace(step=10 * number, seconds=one) for number, one in enumerate(seconds, 1)]


def ranks(*seconds, saves=3):
    return [one.rank for one in find(paces(*seconds), 1.5, saves)]


def test_a_rank_is_compared_with_the_median_of_the_others():
    assert scores(paces((0.02, 0.04))[0]) == [0.5, 2.0]
    assert scores(paces((0.03, 0.02, 0.02, 0.04))[0]) == pytest.approx([1.5, 0.02 / 0.03, 0.02 / 0.03, 0.04 / 0.02])
    assert scores(paces((0.01, 0.02, 0.06))[0]) == pytest.approx([0.25, 0.02 / 0.035, 4.0])
    slow_node = [*[0.02] * 4, *[0.04] * 4]
    assert scores(Pace(step=1, seconds=tuple(slow_node)))[4:] == [2.0] * 4


def test_what_is_unknown_blames_nobody():
    assert scores(paces((math.nan, 0.02, 0.04))[0]) == [1.0, 0.5, 2.0]
    assert scores(paces((math.nan, 0.02))[0]) == [1.0, 1.0] and scores(paces(())[0]) == []


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        ([SLOW] * 3, [3]),
        ([SLOW] * 2, []),  # not yet
        ([SLOW, SLOW, EVEN, SLOW, SLOW], []),  # never three in a row
        ([EVEN, SLOW, SLOW, SLOW, EVEN], [3]),  # over before somebody looked
        ([SLOW] * 3 + [EVEN] * 20, []),  # long ago
        ([EVEN] * 9, []),
        ([(0.08, 0.04, 0.04, 0.04), SLOW, SLOW], []),  # each time another one
        ([(0.06, 0.04, 0.04)] * 3, []),  # the factor itself is not above it
        ([(0.08,) * 4] * 3, []),  # all alike
        ([], []),
    ],
)
def test_a_straggler_is_slow_at_several_saves_in_a_row(seconds, found):
    assert ranks(*seconds) == found


def test_the_least_of_its_scores_is_told():
    (one,) = find(paces(SLOW, (0.04, 0.04, 0.04, 0.064), SLOW), 1.5, 3)
    assert one.times == pytest.approx(1.6) and "1.60 times as long as the others, or longer, at 3 saves" in str(one)


class Run:
    """Four ranks on two nodes, in a job with a spare."""

    def __init__(self, path, **settings):
        self.target, self.said, self.entries = AttemptFolder(path / "01"), [], []
        self.target.path.mkdir()
        self.payload = RunStore(path)
        asked = replace(SETTINGS.stragglers, **settings)
        self.recovery = replace(SETTINGS, stragglers=asked)
        launch = types.SimpleNamespace(gpus_per_node=2, recovery=self.recovery, store=str(path))
        run = types.SimpleNamespace(device="cuda")
        self.folder = types.SimpleNamespace(launch=launch, experiment="x", name="r", run=run)
        self.site = types.SimpleNamespace(
            nodes=["n1", "n2"], spares=["n3"], job=types.SimpleNamespace(can_requeue=True)
        )
        self.watch = Stragglers(self, self.target)

    def say(self, text):
        self.said.append(text)

    def saves(self, *seconds):
        for pace in paces(*seconds):
            append_line(self.target.paces, line(pace))
        return self.watch.reason()


@pytest.fixture
def remembered(monkeypatch, tmp_path):
    monkeypatch.setattr(node_memory, "cluster", lambda: types.SimpleNamespace(cluster=lambda: "here"))
    return lambda: [
        (path.stem, trouble.what) for path in tmp_path.glob("nodes/here/*") for trouble in read_node_troubles(path)
    ]


def test_the_last_lines_are_read_however_long_they_are(tmp_path):
    path, many = tmp_path / "paces.jsonl", paces(*[(0.0373123,) * 4096] * 20)
    assert read_paces(path, 3) == []
    for pace in many:
        append_line(path, line(pace))
    assert read_paces(path, 3) == many[-3:] and read_paces(path, 30) == read_paces(path) == many


def test_it_is_told_once_and_remembered_and_the_ranks_train_on(tmp_path, remembered):
    run = Run(tmp_path)
    assert run.watch.reason() is None and run.saves(SLOW, SLOW) is None and not run.said
    assert run.saves(SLOW) is None and run.saves(SLOW) is None
    (said,) = run.said
    assert said.startswith("WARNING: rank 3 on n2 calculates 2.00 times as long") and remembered() == [("n2", "slow")]


def test_without_a_job_no_node_is_named(tmp_path, remembered):
    run = Run(tmp_path, replace=True)
    run.site.job = None
    assert run.saves(*[SLOW] * 3) is None
    assert run.said[0].startswith("WARNING: rank 3 calculates") and not remembered()


def test_of_a_laptops_processors_nothing_is_told(tmp_path, remembered):
    run = Run(tmp_path)
    run.site.job, run.folder.run.device = None, "cpu"
    assert run.saves(*[SLOW] * 3) is None and not run.said


def test_where_asked_for_its_node_is_left(tmp_path, remembered):
    run = Run(tmp_path, replace=True)
    cause, evidence = run.saves(*[SLOW] * 3)
    assert cause == stragglers.CAUSE == "slow" and evidence.startswith("rank 3 on n2 calculates 2.00 times")
    failure = to_replace(run, run.target)
    assert failure.nodes == ("n2",) and failure.rank == 3 and failure.evidence == evidence


def test_a_node_is_left_once(tmp_path, remembered):
    run = Run(tmp_path, replace=True)
    run.entries = [AttemptEnd(attempt=1, cause="slow", bad_nodes=("n2",))]
    assert run.saves(*[SLOW] * 3) is None and run.said


def test_where_nothing_takes_its_place_it_stays(tmp_path, remembered):
    run = Run(tmp_path, replace=True)
    run.site.spares, run.site.job = [], types.SimpleNamespace(can_requeue=False)
    assert run.saves(*[SLOW] * 3) is None and run.said
    run.site.job = types.SimpleNamespace(can_requeue=True)
    assert to_replace(run, run.target).nodes == ("n2",)


def test_most_nodes_at_once_are_not_replaced(tmp_path, remembered):
    run = Run(tmp_path, replace=True)
    assert run.saves(*[(0.08, 0.01, 0.01, 0.08)] * 3) is None and len(run.said) == 2


def test_after_the_last_save_nothing_is_left(tmp_path, remembered, monkeypatch):
    """The run's last test and its end are still to come."""
    run = Run(tmp_path, replace=True)
    monkeypatch.setattr(stragglers.progress, "last_step", lambda payload: 30)
    monkeypatch.setattr(stragglers.checkpoints, "latest", lambda folder: 30)
    assert run.saves(*[SLOW] * 3) is None and run.said


def test_settings_of_older_versions_have_none(tmp_path):
    run = Run(tmp_path)
    run.recovery = replace(SETTINGS, stragglers=None)
    assert run.saves(*[SLOW] * 3) is None and not run.said and to_replace(run, run.target) is None
