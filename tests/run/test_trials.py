"""What the trials of `snakemake tune` come to: a row for each setting, the winner's keys, what each is worth."""

import pytest
import yaml

from megaboa import files, records
from megaboa.config import keys
from megaboa.records import Setting, Trial, TuneSpec
from megaboa.run import trials

SETTINGS = {
    "mbs1": {},
    "mbs2": {"training.micro_batch_size": 2},
    "tp2-mbs2": {"parallel.tp": 2, "training.micro_batch_size": 2},
    "tp2-recompute": {"parallel.tp": 2, "overrides.model.recompute_granularity": "full"},
    "mbs8": {"training.micro_batch_size": 8},
}
SECONDS = {"mbs1": 1.4, "mbs2": 1.2, "tp2-mbs2": 1.0, "tp2-recompute": 1.6}


def spec(**values):
    settings = tuple(Setting(name=name, values=keys, seconds=0.9) for name, keys in SETTINGS.items())
    paths = {key: keys.split(key, {}) for one in settings for key in one.values}
    given = {"steps": 4, "warmup": 3, "tolerance": 0.03, "confidence": 0.95, "minutes": 10.0, "trial_minutes": 5.0}
    return TuneSpec(own="mbs1", settings=settings, paths=paths, **{**given, **values})


def trial(name, number, *, state="measured", why=None):
    steps = tuple(SECONDS[name] * share for share in (1.0, 1.001, 0.999, 1.0)) if state == "measured" else ()
    return Trial(
        setting=name,
        identity="x",
        round=number,
        state=state,
        why=why,
        steps=steps,
        took=6.0,
        gib=(steps and 40.0) or None,
    )


@pytest.fixture
def done():
    made = [trial(name, 1) for name in SECONDS]
    made.append(trial("mbs8", 1, state="out_of_memory", why="CUDA out of memory"))
    return [*made, *(trial(name, 2) for name in ("tp2-mbs2", "mbs2", "mbs1"))]


def test_a_row_for_each_setting_also_where_memory_ran_out(done):
    found = trials.summary(spec(), done)
    assert [row.setting.name for row in found.settings] == ["tp2-mbs2", "mbs2", "mbs1", "tp2-recompute", "mbs8"]
    assert found.winner == "tp2-mbs2"
    assert found.ended == "confident"
    assert found.confidence > 0.99
    assert (found.settings[-1].state, found.settings[-1].why) == ("out_of_memory", "CUDA out of memory")
    assert found.settings[1].slower == pytest.approx(0.2, abs=1e-3)
    assert found.minutes == pytest.approx(0.8)
    assert "CUDA out of memory" in trials.table(found)[-1]
    assert "of 5 settings, 4 of which work" in trials.text(found)


def test_what_each_key_of_the_winner_is_worth(done):
    found = {one.key: one for one in trials.summary(spec(), done).worth}
    assert (found["parallel.tp"].instead, found["training.micro_batch_size"].instead) == ("mbs2", "mbs1")
    assert found["parallel.tp"].slower == pytest.approx(0.2, abs=1e-3)
    assert found["overrides.model.recompute_granularity"].instead == "tp2-recompute"


def test_the_winner_can_be_pasted(done):
    text = trials.yaml(trials.summary(spec(), done), spec())
    assert yaml.safe_load(text) == {"parallel": {"tp": 2}, "training": {"micro_batch_size": 2}}


def test_it_says_how_sure_it_is_when_the_time_is_up(done):
    found = trials.summary(spec(confidence=0.9999), done[:5])
    assert found.ended == "out_of_time" and 0 < found.confidence < 0.9999
    assert any("raise tune.minutes" in sentence for sentence in trials.conclusion(found))


def test_while_a_setting_is_untried_nothing_is_sure(done):
    """It may be the fastest: it doesn't count as one that doesn't work."""
    found = trials.summary(spec(), done[:1])
    assert (found.winner, found.confidence, found.ended) == ("mbs1", 0.0, "out_of_time")
    first, second, third = trials.conclusion(found)
    assert first == "mbs1: 1.4 s/step, of 5 settings, 1 of which works, 4 not tried"
    assert second.startswith("0.0% sure") and "(1 trial, 0.1 minutes" in second
    assert third.startswith("the time was up before it was as sure as tune.confidence")


def test_a_sure_result_is_not_called_unsure_where_a_round_was_broken_off(done):
    found = trials.summary(spec(), done[:-1])
    assert found.ended == "round_unfinished" and found.confidence > 0.95
    assert trials.conclusion(found)[-1].startswith("the time was up in a round, whose other trials may change this")


def test_a_setting_counts_by_the_median_of_its_trials(done):
    """Not by the fastest, which would favour what was tried most often."""
    noisy = [trial("mbs2", 3), trial("mbs2", 4)]
    faster, slower = (
        records.parse(Trial, {**records.plain(one), "steps": [share * second for second in one.steps]}, "a trial")
        for one, share in zip(noisy, (0.5, 1.1), strict=True)
    )
    found = trials.summary(spec(), [*done, faster, slower])
    row = next(row for row in found.settings if row.setting.name == "mbs2")
    assert (row.trials, row.seconds) == (4, pytest.approx(1.2, rel=0.01))
    assert "slower: by trials of the same rounds" in trials.text(found)


def test_the_winner_of_a_listed_run_is_that_runs_alone(done):
    """At the top, its keys would change all other runs, and not this one where its own sweep sets them."""
    text = trials.yaml(trials.summary(spec(), done), spec(run="a", swept="runs"))
    assert yaml.safe_load(text) == {"sweep": {"runs": {"a": {"parallel.tp": 2, "training.micro_batch_size": 2}}}}


def test_the_winner_of_a_run_of_a_grid_says_what_wins(done):
    text = trials.yaml(trials.summary(spec(), done), spec(run="a", swept="grid"))
    assert "the sweep's own values win over these" in text
    assert yaml.safe_load(text) == {"parallel": {"tp": 2}, "training": {"micro_batch_size": 2}}


def test_where_the_run_as_it_is_wins_there_is_nothing_to_paste(done):
    text = trials.yaml(trials.summary(spec(), [trial("mbs1", 1), trial("tp2-recompute", 1)]), spec())
    assert yaml.safe_load(text) == {}, "Snakemake refuses a file that is empty or has comments only"
    assert "it is the run as it is" in text


def test_nothing_works():
    found = trials.summary(spec(), [trial(name, 1, state="out_of_memory") for name in SETTINGS])
    assert (found.winner, found.ended) == (None, "nothing_works")
    assert trials.conclusion(found) == ["no setting works: 5 trials failed"]
    assert trials.yaml(found, spec()) == "# no setting works: 5 trials failed\n{}\n"


def test_a_ledger_is_read_up_to_a_torn_line_and_without_other_runs_trials(tmp_path):
    path = tmp_path / "trials.jsonl"
    ledger = trials._Ledger(path, {"mbs1": "x", "mbs2": "changed"})
    ledger.add(trial("mbs1", 1))
    files.append_line(path, records.line(trial("mbs2", 1)))
    with path.open("a") as stream:
        stream.write('{"event": "trial", "setting": "mb')
    again = trials._Ledger(path, {"mbs1": "x", "mbs2": "changed"})
    assert [one.setting for one in again.trials] == ["mbs1"]
    again.add(trial("mbs1", 2))
    assert [one.round for one in trials._Ledger(path, {"mbs1": "x"}).trials] == [1, 2]
