"""The profiler's own cost, from the log of the steps that the profile's run wrote."""

import json

from megaboa.observe.traces.analysis import about_cost, perturbation


def log_of(folder, seconds):
    path = folder / "steps.jsonl"
    events = [{"event": "step", "step": step, "seconds": value} for step, value in seconds.items()]
    path.write_text("".join(json.dumps(event) + "\n" for event in [{"event": "train_start"}, *events]))
    return path


def test_captured_steps_are_held_against_those_after_them(tmp_path):
    # 3 to 7 are captured, of which 4 to 6 count; 8 pays for the capture's end.
    seconds = {1: 9.0, 2: 0.1, 3: 0.5, 4: 0.12, 5: 0.12, 6: 0.12, 7: 0.3, 8: 4.0, 9: 0.1, 10: 0.1}
    found = perturbation(log_of(tmp_path, seconds), [3, 8])
    assert (found.captured_n, found.reference_n, found.reference) == (3, 2, "steps 9 to 10")
    assert round(found.slowdown, 6) == 0.2
    (finding,) = about_cost(found)
    assert finding.code == "perturbed" and "+20.0%" in finding.text and "n = 3" in finding.text


def test_of_two_captured_steps_both_count(tmp_path):
    seconds = {5: 0.1, 6: 0.3, 7: 0.5, 8: 4.0, 9: 0.2, 10: 0.2}
    found = perturbation(log_of(tmp_path, seconds), [6, 8])
    assert (found.captured_n, found.reference_n) == (2, 2) and round(found.slowdown, 6) == 1.0


def test_a_cost_that_is_none_is_no_finding(tmp_path):
    assert about_cost(perturbation(log_of(tmp_path, dict.fromkeys(range(1, 12), 0.1)), [3, 8])) == []


def test_without_steps_to_compare_nothing_is_said(tmp_path):
    assert perturbation(log_of(tmp_path, {4: 0.1, 5: 0.1}), [3, 8]) is None
    assert perturbation(tmp_path / "none.jsonl", [3, 8]) is None and about_cost(None) == []
