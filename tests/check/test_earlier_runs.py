from megaboa.check import earlier_runs
from megaboa.files import write_json

RUN = {
    "model": {"name": "dense", "init": "scratch", "hf": "a/b"},
    "training": {"global_batch_size": 8, "micro_batch_size": 1, "seq_length": 64, "precision": "fp32", "seed": 1},
    **{"parallel": {"tp": 2}, "world_size": 2, "device": "cuda", "overrides": {}},
}


def earlier(results, experiment, run, seconds, state="PASS", gpu="h100-80g"):
    folder = results / experiment / "runs" / "r"
    write_json(folder / "run.json", run)
    write_json(folder / "launch.json", {"gpu": gpu})
    write_json(
        folder / "metrics/summary.json",
        {"run": "a", "state": state, "step_seconds": seconds and {"median": seconds, "p5": 0.0, "p95": 9.0, "n": 9}},
    )


def test_the_speed_of_earlier_runs_of_the_same_kind(tmp_path):
    other_seed = {**RUN, "training": {**RUN["training"], "seed": 2}, "model": {**RUN["model"], "name": "again"}}
    earlier(tmp_path, "a", RUN, 1.0)
    earlier(tmp_path, "b", other_seed, 3.0)
    earlier(tmp_path, "c", {**RUN, "parallel": {"tp": 1}}, 9.0)
    earlier(tmp_path, "d", RUN, 9.0, state="INVALID")
    earlier(tmp_path, "e", RUN, 5.0, gpu="h200-141g")
    earlier(tmp_path, "f", RUN, None)
    speeds = earlier_runs.speeds(tmp_path)
    assert speeds[earlier_runs.key(RUN, "h100-80g")] == 2.0
    assert speeds[earlier_runs.key(RUN, "h200-141g")] == 5.0
    assert earlier_runs.key(RUN, None) not in speeds


def test_nothing_is_known_before_the_first_experiment(tmp_path):
    assert earlier_runs.speeds(tmp_path) == {}
