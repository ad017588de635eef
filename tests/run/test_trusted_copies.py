"""megaboa.run.trusted_copies: when copies on nodes still count."""

import pytest
from pretended_run import INTERVAL, LAST, Run

from megaboa import files
from megaboa.records import AttemptEnd, line, parse
from megaboa.run import ledger, trusted_copies
from megaboa.store_paths import RunStore

# It plays ranks that begin with copies of step 5, as long as they lie under the name that they are given.
TAKES = """
if attempt > 1 and os.environ["PLAYED"] == given.local_copies and begin < 5:
    (folder / "local.json").write_text('{"iteration": 5}')
    begin = 5
"""


def test_a_store_has_one_name_until_it_is_forgotten_and_another_store_another(tmp_path):
    one, other = RunStore(tmp_path / "one"), RunStore(tmp_path / "other")
    first = trusted_copies.name(one)
    assert trusted_copies.name(one) == first != trusted_copies.name(other)
    assert trusted_copies.forget(one) == trusted_copies.name(one) != first
    one.local_copies.write_text("{")
    assert trusted_copies.name(one) not in ("", first), "a torn file is as none"


@pytest.mark.parametrize(
    ("end", "bad"),
    [
        ({"cause": "crash", "local": 5}, True),
        ({"cause": "damaged_checkpoint", "local": 5}, True),
        ({"cause": "crash", "local": 5, "last_step": 6}, False),
        ({"cause": "crash"}, False),
        ({"cause": "node_failure", "local": 5}, False),
        ({"cause": "cancelled", "local": 5}, False),
        ({"cause": "nan", "last_step": 8}, True),
        ({"cause": "loss_spike", "last_step": 8}, True),
        ({"outcome": "completed"}, False),
    ],
)
def test_copies_count_no_more_after_they_failed_or_the_state_was_bad(end, bad):
    assert trusted_copies.failed([AttemptEnd(attempt=2, **end)]) is bad


def test_copies_with_which_two_attempts_came_to_no_step_count_no_more():
    """Whatever ended them: to load them may have ended the supervisor."""
    ends = [AttemptEnd(attempt=number, cause="lost", local=5) for number in (2, 3)]
    assert trusted_copies.failed(ends) and not trusted_copies.failed(ends[:1])
    assert not trusted_copies.failed([AttemptEnd(attempt=2, cause="lost", local=4), ends[1]])


def test_copies_of_steps_that_were_given_up_count_no_more():
    """Attempt 2 was on other nodes, began with the checkpoint and made steps: what 1 has copied is another branch."""
    ends = [AttemptEnd(attempt=1, last_step=9), AttemptEnd(attempt=2, last_step=7)]
    assert trusted_copies.lineage([]) == trusted_copies.lineage(ends[:1]) == 1
    assert trusted_copies.lineage(ends) == 2
    assert trusted_copies.lineage([*ends, AttemptEnd(attempt=3, local=6, last_step=8)]) == 2
    assert trusted_copies.lineage([ends[0], AttemptEnd(attempt=2)]) == 1, "which came to no step"


def test_a_beginning_with_newer_copies_is_progress_and_a_step_that_fails_after_them_is_the_same():
    def end(number, **given):
        return AttemptEnd(attempt=number, outcome="failed", cause="crash", iteration=4, **given)

    entries = [end(1, last_step=6), end(2, local=6)]
    assert ledger.failures_in_a_row(entries) == 1, "the copies of step 6 are newer than checkpoint 4"
    assert ledger.fails_again_at(entries) is None, "the copies may be the cause"
    assert ledger.fails_again_at([*entries, end(3, last_step=6)]) == 7
    assert parse(AttemptEnd, files.json.loads(line(entries[1])), "a ledger").local == 6


@pytest.fixture
def run(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    launch = files.read_json(run.folder.path / "launch.json")
    launch["checkpoint"]["local"] = {"every": 1, "folder": "/tmp", "partner": None}
    files.write_json(run.folder.path / "launch.json", launch)
    monkeypatch.setenv("PLAYED", trusted_copies.name(run.store))
    return run


def play(run, misfortune):
    """Ranks that die as this says."""
    run.misfortune(misfortune)
    text = run.rank.read_text().replace(
        'parser.add_argument("--resume-from"',
        'parser.add_argument("--local-copies")\nparser.add_argument("--resume-from"',
    )
    run.rank.write_text(
        text.replace("attempt, step = int(folder.name), None\n", f"attempt, step = int(folder.name), None\n{TAKES}")
    )


def test_the_ledger_says_which_copies_an_attempt_began_with_and_what_was_done_twice(run):
    play(run, "attempt == 1 and step == 5 and sys.exit('RuntimeError: bad luck')")
    assert run.train().iteration == LAST
    ends = ledger.ends(run.entries)
    assert [(end.first_step, end.last_step, end.local, end.repeated) for end in ends] == [
        (1, 5, None, 0),
        (6, LAST, 5, 0),
    ]
    assert ends[0].iteration == 5 // INTERVAL * INTERVAL


def test_copies_that_end_ranks_before_a_step_are_taken_once_and_the_checkpoint_then(run):
    play(run, "(attempt == 1 and step == 5 or begin == 5 and step is None) and sys.exit('RuntimeError: bad luck')")
    assert run.train().iteration == LAST
    assert [(end.first_step, end.local, end.repeated) for end in ledger.ends(run.entries)] == [
        (1, None, 0),
        (None, 5, 0),
        (5, None, 1),
    ]
