"""megaboa.run.site: whose Python ranks take, and how long nodes are given to answer the health check."""

from dataclasses import replace

import pytest

from megaboa.config.models.resources import Launch
from megaboa.records import Inside, LaunchSpec, parse, plain
from megaboa.run import site
from megaboa.scheduler.ranks import Ended


def launch(**start):
    start = Launch().model_dump(mode="json") | start
    return parse(LaunchSpec, {"gpus_per_node": 4, "cpus_per_rank": 3, "start": start}, "a test")


def test_the_python_of_a_container_is_its_own():
    inside = Inside(runtime="pyxis", mounts=(), secrets=(), workdir="/w")
    assert site.python_of(launch(python="/opt/python")) == "/opt/python"
    assert site.python_of(launch()) == site.sys.executable
    assert site.python_of(replace(launch(), image=inside)) == "python3"


# The health check


class Check:
    """A check of ten nodes in a time of our own: when each begins, and when srun ends."""

    def __init__(self, out, monkeypatch, begins, ends=None):
        self.out, self.begins, self.ends, self.now = out, begins, ends, 0.0
        monkeypatch.setattr(site.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(site.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.now += seconds
        for number, moment in enumerate(self.begins):
            if moment <= self.now:
                (self.out / f"n{number}.begun").touch()

    def poll(self):
        return "ended" if self.ends and self.ends <= self.now else None

    def waited(self, **start):
        patience = launch(**start).start.health_check_seconds
        return site.wait_for_answers(self, self.out, 10, 30, patience)


def test_the_health_check_is_over_when_all_have_answered(tmp_path, monkeypatch):
    assert Check(tmp_path, monkeypatch, [1.0] * 10, ends=12.0).waited() == pytest.approx(12, abs=1)


def test_nodes_that_start_slowly_are_waited_for_as_half_of_them_start(tmp_path, monkeypatch):
    """An image from a slow file system: the first after 50 s, half after 80 s, the last after 200 s."""
    begins = [50, 60, 70, 75, 80, 100, 120, 150, 180, 200]
    assert Check(tmp_path, monkeypatch, begins, ends=230.0).waited() == pytest.approx(230, abs=1)
    for path in tmp_path.iterdir():
        path.unlink()
    silent = Check(tmp_path, monkeypatch, begins[:-1])
    assert silent.waited() == pytest.approx(3 * 80 + 30 + site.CHECK_END_SECONDS, abs=2)


@pytest.mark.parametrize("patience", [90.0, 200.0])
def test_where_most_start_at_once_the_silent_are_waited_for_as_the_experiment_says(tmp_path, monkeypatch, patience):
    check = Check(tmp_path, monkeypatch, [2.0] * 9)
    assert check.waited(health_check_seconds=patience) == pytest.approx(patience + 40, abs=1)


def test_a_launch_of_an_older_version_says_nothing_of_it(tmp_path, monkeypatch):
    check = Check(tmp_path, monkeypatch, [])
    older = plain(launch())
    del older["start"]["health_check_seconds"]
    patience = parse(LaunchSpec, older, "a test").start.health_check_seconds
    assert site.wait_for_answers(check, tmp_path, 2, 30, patience) == pytest.approx(130, abs=1)


# The image


class Hosts:
    """Hosts on which images are unpacked: `ends` says how each step goes, by the number of its hosts."""

    def __init__(self, nodes, ends):
        self.nodes, self.ends, self.did = [f"n{number}" for number in range(nodes)], ends, []
        self.spares = []

    def unpack_image(self, nodes, logs):
        self.did.append(nodes)
        end = self.ends.pop(0)
        if end is None:
            return None
        (logs / "node-0.log").write_text(f"slurmstepd-n1: error: pyxis: {end}\n" if end != "well" else "")
        return Step(Ended(0, int(end != "well")))

    def share_image(self):
        self.did.append("share")

    def remove_image(self):
        self.did.append("remove")


class Step:
    def __init__(self, end):
        self.end, self.killed = end, False

    def poll(self):
        return self.end

    def kill(self):
        self.killed = True


@pytest.mark.parametrize(
    ("nodes", "ends", "did"),
    [
        (2, [None], [2]),  # no pyxis, nothing to do
        (2, ["well"], [2, "share"]),
        (1, ["well"], [1, "share"]),
        (2, ["File exists", "well", "well"], [2, "remove", 1, 2, "share"]),  # in a folder that hosts share
        (2, ["damaged", "damaged"], [2, "remove", 1, "remove"]),
        (1, ["damaged"], [1, "remove"]),
    ],
)
def test_the_image_is_unpacked_once(nodes, ends, did, tmp_path):
    hosts = Hosts(nodes, list(ends))
    failed = site.share_image(hosts, tmp_path / "image", lambda: False)
    assert hosts.did == did and failed == (None if did[-1] != "remove" else "damaged")


def test_who_starts_ranks_without_a_supervisor_removes_the_image(tmp_path, capsys):
    hosts = Hosts(2, ["File exists", "well", "well"])
    with pytest.raises(ValueError, match="of the ranks"), site.image_shared(hosts, tmp_path / "image"):
        hosts.did.append("ranks")
        raise ValueError("of the ranks")
    assert hosts.did == [2, "remove", 1, 2, "share", "ranks", "remove"] and not capsys.readouterr().err
    with site.image_shared(Hosts(1, ["damaged"]), tmp_path / "image"):
        assert "could not be unpacked once for all steps: damaged" in capsys.readouterr().err


def test_who_is_stopped_waits_for_no_image(tmp_path, monkeypatch):
    step = Step(None)
    hosts = Hosts(2, [])
    monkeypatch.setattr(hosts, "unpack_image", lambda nodes, logs: step)
    assert site.share_image(hosts, tmp_path / "image", lambda: True)
    assert step.killed and hosts.did == ["remove"]
