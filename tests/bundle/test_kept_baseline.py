"""What a report compares with is copied from results folders and bundles, and stays when they are gone."""

import json
import shutil
from pathlib import Path

import pytest
from called import called
from fake_runs import FakeExperiment

from megaboa.bundle.archive import pack
from megaboa.bundle.baseline import keep
from megaboa.bundle.contents import MANIFEST, data_needed
from megaboa.bundle.crate import METADATA, metadata
from megaboa.config import ConfigError, load
from megaboa.errors import InputError
from megaboa.files import canonical, write_json
from megaboa.plan.planner import make_plan
from megaboa.plan.shared import Shared
from megaboa.records import BaselineSpec, BundleEnvironment, BundleManifest, plain

RECIPE = Path(__file__).parents[2] / "recipes" / "gpt_tiny.py"
EXPERIMENT = f"experiment: good\ndevice: cpu\nmodels: {{m: {{recipe: {RECIPE}}}}}\n"


def experiment(root, **values):
    made = FakeExperiment(root)
    made.completed_run("dp1", steps=30, **values)
    made.measure("dp1")
    return made.results


def bundle(path, folder):
    manifest = BundleManifest(experiment="tiny", config=(), device=("cpu",), environment=BundleEnvironment(packages={}))
    files = {MANIFEST: canonical(plain(manifest)).encode(), "Snakefile": b"", "LICENSE": b""}
    kept = [one for one in folder.rglob("*") if one.is_file() and one.name != "attempts.jsonl"]
    files |= {f"results/tiny/{one.relative_to(folder)}": one.read_bytes() for one in kept}
    files["results/tiny/report/index.html"] = b"large"
    files[METADATA] = canonical(metadata(files, manifest, "tiny", None, 0.0)).encode()
    path.write_bytes(pack(files))
    return path


def ask(results, *paths):
    asked = BaselineSpec(paths=tuple(map(str, paths)), slower=0.02, more_memory=0.02, higher_loss=0.005)
    settings = {"title": None, "agreements": [], "proofs": [], "baseline": plain(asked) if paths else None}
    write_json(results / "specs" / "report.json", settings)


def report(results, config):
    command = ["report", "--out", results / "report" / "index.html", "--settings", results / "specs" / "report.json"]
    command += ["--captions", RECIPE.parents[1] / "workflow" / "report" / "captions.yaml", "--config-file", config]
    return called(*command), results / "report"


def test_a_report_has_the_checks_and_can_be_made_again_without_the_earlier_runs(tmp_path):
    (tmp_path / "my.yaml").write_text("experiment: tiny\n")
    old, new = experiment(tmp_path / "old"), experiment(tmp_path / "new", seconds=0.2)
    zipped = bundle(tmp_path / "old.zip", experiment(tmp_path / "zipped"))
    ask(new, old, zipped)
    assert [one.key for one in data_needed(new)] == ["report.baseline.path"] * 2
    done, folder = report(new, tmp_path / "my.yaml")
    assert done.returncode == 0, done.stderr
    found = {check["quantity"]: check for check in json.loads((folder / "checks.json").read_text())["checks"]}
    assert found["loss.tail_mean"]["state"] == "PASS" and found["step_seconds"]["runs"] == [1, 2]
    html = (folder / "index.html").read_text()
    assert 'id="baseline"' in html and "step time (seconds)" in html and "no reasonable number" not in html
    assert "verdict" in (folder / "tables" / "baseline.tsv").read_text()
    kept = {path.relative_to(new / "baseline").as_posix() for path in (new / "baseline").rglob("*") if path.is_file()}
    metrics = {
        f"{n}/runs/dp1/metrics/{name}" for n in (1, 2) for name in ("steps.parquet", "summary.json", "goodput.json")
    }
    assert kept == metrics | {
        f"{n}/{name}" for n in (1, 2) for name in ("plan.tsv", "source.json", "runs/dp1/run.json")
    }
    shutil.rmtree(old)
    zipped.unlink()
    before = (folder / "checks.json").read_bytes()
    done, _ = report(new, tmp_path / "my.yaml")
    assert done.returncode == 0 and (folder / "checks.json").read_bytes() == before
    assert data_needed(new) == [], "others need neither: the bundle has the copies"
    ask(new, old, tmp_path / "other.zip")
    with pytest.raises(InputError, match=r"other.zip: there is neither a results folder nor a bundle"):
        keep(new)
    assert [one.path for one in data_needed(new)] == [str(tmp_path / "other.zip")], "the copy is of another"


def test_what_is_no_longer_asked_for_is_removed_and_what_never_was_there_is_an_error(tmp_path):
    old, new = experiment(tmp_path / "old"), experiment(tmp_path / "new")
    ask(new, old)
    keep(new)
    assert (new / "baseline" / "1" / "plan.tsv").exists()
    ask(new)
    keep(new)
    assert not (new / "baseline" / "1").exists()
    ask(new, tmp_path / "none.zip")
    with pytest.raises(InputError, match=r"report.baseline.path: .*none.zip: there is neither a results folder nor a"):
        keep(new)
    done, _ = report(new, tmp_path / "my.yaml")
    assert done.returncode == 1 and "Traceback" not in done.stderr


@pytest.fixture
def planned(tmp_path):
    def plan(baseline):
        path = tmp_path / "good.yaml"
        path.write_text(f"{EXPERIMENT}report: {{baseline: {baseline}}}\n")
        return make_plan(load([path]), tmp_path / "results")

    return plan


def test_the_plan_takes_folders_and_bundles_and_names_what_is_neither(tmp_path, planned):
    old = experiment(tmp_path / "old")
    zipped = bundle(tmp_path / "old.zip", old)
    plan = planned(f"{{path: [{old}, {zipped}], slower: 0.1}}")
    shared = Shared(plan, tmp_path / "results")
    assert shared.baselines == [str(old / "plan.tsv"), str(zipped)]
    with pytest.raises(
        ConfigError, match=r"good.yaml:4: report.baseline.path: .*nothing: is neither a bundle \(.zip\)"
    ):
        planned(f"{{path: {tmp_path}/nothing}}")
    experiment(tmp_path).rename(tmp_path / "results" / "good")
    with pytest.raises(ConfigError, match="lies in this experiment's own results"):
        planned(f"{{path: {tmp_path}/results/good}}")
    with pytest.raises(ConfigError, match="slower"):
        planned(f"{{path: {old}, slower: -1}}")
