"""`megaboa compare A.zip B.zip`: two bundles of one experiment, and whether they agree."""

import json
import math
import re

import made
import pytest
from called import called
from fake_runs import FakeExperiment, loss_at

from megaboa.bundle.archive import pack
from megaboa.bundle.contents import MANIFEST
from megaboa.bundle.crate import METADATA, metadata
from megaboa.files import canonical, write_json
from megaboa.records import AgreementSpec, BundleEnvironment, BundleManifest, Evaluation, plain, write
from megaboa.report.agreement import agreement_checks
from megaboa.report.comparison import Side, agreements_of
from megaboa.report.runs import load_runs

TWINS = AgreementSpec(reference="dp1", runs=("tp2",), tolerance=1e-5, twins=("dp1-twin1",))
PYTHON = {"torch": "2.9.1", "Snakemake_x": "1.0"}


def results(root, noise=0.0, agreements=(TWINS,), **losses):
    """dp1, which is exported, a twin of it, and tp2; `noise` is what this machine's rounding does to all of them."""
    fake = FakeExperiment(root)
    for number, name in enumerate(("dp1", "tp2", "dp1-twin1")):
        fake.completed_run(name, steps=30, noise=noise + number * 1e-6, losses=losses.get(name.replace("-", "_")))
        fake.measure(name)
    fake.export("dp1")
    write_json(
        fake.results / "specs" / "report.json",
        {"title": None, "proofs": [], "agreements": [plain(one) for one in agreements]},
    )
    write_json(fake.results / "data" / "text.json", {"digest": f"of {root.name[:1]}"})
    return fake.results


def bundle(path, folder, packages=PYTHON, **values):
    environment = BundleEnvironment(packages=packages, of="the runs", python="3.12.4", system="Linux x86_64")
    manifest = BundleManifest(experiment="tiny", config=(), device=("cpu",), environment=environment, **values)
    files = {MANIFEST: canonical(plain(manifest)).encode(), "Snakefile": b"", "LICENSE": b""}
    kept = [one for one in folder.rglob("*") if one.is_file() and one.name != "attempts.jsonl"]
    files |= {f"results/tiny/{one.relative_to(folder)}": one.read_bytes() for one in kept}
    files[METADATA] = canonical(metadata(files, manifest, "tiny", None, 0.0)).encode()
    path.write_bytes(pack(files))
    return path


@pytest.fixture
def first(tmp_path):
    return bundle(tmp_path / "a.zip", results(tmp_path / "a"), commit="1111")


def compare(tmp_path, first, second):
    done = called("compare", first, second, "--into", tmp_path / "out")
    return done, tmp_path / "out"


def checks(out):
    return json.loads((out / "checks.json").read_text())["checks"]


def test_a_bundle_agrees_with_itself(tmp_path, first):
    done, out = compare(tmp_path, first, first)
    assert done.returncode == 0, done.stderr
    assert [(check["run"], check["verdict"]) for check in checks(out)] == [("dp1 in B", "equal"), ("tp2 in B", "equal")]
    assert done.stdout.splitlines()[-1] == f"PASS: {out / 'index.html'}"
    html = (out / "index.html").read_text()
    assert "Of 2 runs: 2 equal." in html and "All packages have the same versions." in html
    assert "was not trained again: dp1, tp2, dp1-twin1." in html
    assert "Nothing: configuration, corpora, tokenizers, models and evaluation scripts are the same." in html


def test_another_machines_rounding_is_within_what_rounding_does_there(tmp_path, first):
    """And its environment's differences are named."""
    other = bundle(
        tmp_path / "b.zip", results(tmp_path / "b", noise=3e-6), {"torch": "2.10.0", "snakemake-x": "1.0"}, commit="2"
    )
    done, out = compare(tmp_path, first, other)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [check["verdict"] for check in checks(out)] == ["within rounding"] * 2 and checks(out)[0]["twins"] > 0
    html = (out / "index.html").read_text()
    assert "1 packages differ" not in html and "1 package differs" in html
    for text in ("<td>2.9.1</td><td>2.10.0</td>", "1111", "corpus text: not the same content", "B over A"):
        assert text in html
    assert (out / "differences.pdf").exists() and (out / "data" / "differences.tsv").exists()


def test_results_of_evaluations_are_next_to_each_other(tmp_path):
    sides = {"a": {"held.acc": 0.5, "held.bad": math.nan}, "b": {"held.acc": 0.52, "held.bad": 1.0, "held.f1": 0.75}}
    for side, values in sides.items():
        of_dp1 = Evaluation(run="dp1", command="python my.py", export="1", iteration=30, path="hf", values=values)
        write(results(tmp_path / side) / "runs/dp1/evaluation.json", of_dp1)
    _, out = compare(tmp_path, *(bundle(tmp_path / f"{side}.zip", tmp_path / side / "results/tiny") for side in sides))
    rows = re.findall(r"<td>(held.*?)</td>\n(.*?)</tr>", (out / "index.html").read_text(), re.DOTALL)
    cells = {name: re.findall(r'<td class="number">(.*?)</td>', text) for name, text in rows}
    assert cells == {
        "held.acc": ["0.5", "0.52", "+0.02"], "held.bad": ["NaN", "1", ""], "held.f1": ["none", "0.75", ""],
    }  # fmt: skip


def differences(tmp_path, *sides):
    """What the page says that differs, if `sides` are the evaluations of dp1."""
    for side, found in zip("ab", sides, strict=True):
        write(results(tmp_path / side) / "runs/dp1/evaluation.json", made.evaluation(run="dp1", **found))
        write_json(tmp_path / side / "results/tiny/data/text.json", {"digest": "same"})
    _, out = compare(tmp_path, *(bundle(tmp_path / f"{side}.zip", tmp_path / side / "results/tiny") for side in "ab"))
    return re.findall(r"<li>(.*?)</li>", (out / "index.html").read_text())


def test_an_edited_script_of_the_evaluation_is_a_difference(tmp_path):
    one, other = ({"command": "python my.py", "files": {"my.py": letter * 64}} for letter in "ab")
    said = ["evaluate.command: my.py with SHA-256 aaaaaaaa, in B bbbbbbbb (dp1)"]
    assert differences(tmp_path, one, other) == said


def test_another_command_of_the_evaluation_is_a_difference(tmp_path):
    one = {"command": "python my.py", "files": {"my.py": "a"}}
    other = {"command": "python my.py --fast x.py", "files": {"my.py": "a", "x.py": "b"}}
    assert differences(tmp_path, one, other) == ["evaluate.command: python my.py, in B python my.py --fast x.py (dp1)"]


@pytest.mark.parametrize(("files", "said"), [
    ({}, ["evaluate.command: my.py with SHA-256 aaaaaaaa, in B unknown (dp1)"]),
    ({"my.py": "a" * 64}, []),
])  # fmt: skip
def test_evaluations_of_older_versions_have_unknown_scripts(tmp_path, files, said):
    one = {"command": "python my.py", "files": {"my.py": "a" * 64}}
    assert differences(tmp_path, one, {"command": "python my.py", "files": files}) == said


def test_losses_that_are_different_end_with_an_error(tmp_path, first):
    losses = {step: loss_at(step) + 0.01 for step in range(5, 31)}
    other = bundle(tmp_path / "b.zip", results(tmp_path / "b", tp2=losses))
    done, out = compare(tmp_path, first, other)
    assert done.returncode == 1
    assert "FAIL     tp2 in B agrees with tp2 in A: different: 26 of 30 steps differ" in done.stdout
    assert [(check["verdict"], check["beyond_at"]) for check in checks(out)] == [("equal", None), ("different", 5)]


def test_a_run_that_only_one_of_them_has_is_not_run(tmp_path, first):
    other = FakeExperiment(tmp_path / "b")
    other.completed_run("dp1", steps=30)
    other.measure("dp1")
    write_json(other.results / "specs" / "report.json", {"title": None, "proofs": [], "agreements": []})
    done, out = compare(tmp_path, first, bundle(tmp_path / "b.zip", other.results))
    states = {check["run"]: check["state"] for check in checks(out)}
    assert done.returncode == 0 and states == {"dp1 in B": "PASS", "tp2 in B": "NOT_RUN"}


def test_bundles_without_a_common_run_are_refused(tmp_path, first):
    other = FakeExperiment(tmp_path / "b")
    other.completed_run("other", steps=30)
    other.measure("other")
    write_json(other.results / "specs" / "report.json", {"title": None, "proofs": [], "agreements": []})
    done, _ = compare(tmp_path, first, bundle(tmp_path / "b.zip", other.results))
    assert done.returncode == 1 and "has no run of a name that" in done.stderr


def test_limits_come_from_what_agreed_on_the_first_machine(tmp_path):
    folder = results(tmp_path / "a", agreements=(TWINS, AgreementSpec(reference="tp2", runs=("dp1",), tolerance=1e-9)))
    runs = load_runs(folder)
    assert agreement_checks([TWINS], runs)[0].verdict == "within rounding"
    side = Side(tmp_path, folder, None)
    specs = {spec.runs[0]: spec for spec in agreements_of(side, ["dp1", "tp2", "dp1-twin1"], runs)}
    assert specs.keys() == {"dp1 in B", "tp2 in B"}
    assert specs["tp2 in B"].twins == ("dp1 in A", "dp1-twin1 in A")
