"""Where a bundle is made again, and what must not happen there."""

import importlib.metadata
import json
from dataclasses import replace
from hashlib import sha256

import made
import pytest

from megaboa.__main__ import main
from megaboa.bundle.archive import pack
from megaboa.bundle.crate import METADATA, metadata
from megaboa.bundle.rebuild import (
    MARKER,
    OF_REPORT,
    OF_RUN,
    TABLES,
    WITHOUT_TIMES,
    _anchored,
    claim,
    compare,
    opened,
    other_packages,
)
from megaboa.commands.reproduce import reproduce, show
from megaboa.errors import InputError
from megaboa.files import canonical, write_text
from megaboa.observe.steps import step_rows, write_steps
from megaboa.records import BundleEnvironment, BundleManifest, Loss, Spread, Step, Summary, plain

MANIFEST = BundleManifest(experiment="tiny", config=(), device=("cpu",), environment=BundleEnvironment(packages={}))
RUN = "results/tiny/runs/a"


def bundle_of(path, files, **changed):
    files = {"bundle.json": canonical(plain(MANIFEST)).encode(), **files}
    crate = canonical(metadata(files, MANIFEST, "Tiny", None, 0.0)).encode()
    packed = {**files, METADATA: crate, **changed}
    path.write_bytes(pack({name: content for name, content in packed.items() if content is not None}))
    return path


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"b": b"y"}, r"b differs from ro-crate-metadata\.json: it was changed"),
        ({"more": b"x"}, r"more isn't listed in ro-crate-metadata\.json: it was added"),
        ({"b": None}, r"b is missing, and ro-crate-metadata\.json lists it: copy or download the bundle again"),
    ],
)
def test_files_are_those_of_the_metadata(tmp_path, changed, said):
    files, manifest = opened(bundle_of(tmp_path / "x.zip", {"a b/ä": b"x", "b": b"x"}))
    assert manifest == MANIFEST and files["a b/ä"] == b"x"
    with pytest.raises(InputError, match=rf"x\.zip: {said}"):
        opened(bundle_of(tmp_path / "x.zip", {"b": b"x"}, **changed))


def test_what_is_no_bundle_is_one_sentence(tmp_path):
    (tmp_path / "x.zip").write_bytes(pack({"bundle.json": b"{}"}))
    with pytest.raises(InputError, match=r"is not a bundle of this project: it has no ro-crate-metadata\.json"):
        opened(tmp_path / "x.zip")
    (tmp_path / "x.zip").write_bytes(pack({"bundle.json": b"{}", METADATA: b"[]"}))
    with pytest.raises(InputError, match=r"x\.zip: ro-crate-metadata\.json is damaged: copy or download the bundle"):
        opened(tmp_path / "x.zip")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"config": None},
            r"can't be read as BundleManifest \(it lacks config\): it was made so, and is not used; ask its ",
        ),
        ({"config": 5}, r".*\(config is 5, not a list\): it was made so"),
        ({"device": ["c\0"]}, r"'c\\x00' has a NUL"),
        ({"config": [1]}, r".*\(config\[0\] is 1, not text\)"),
        ({"config": ["../../../etc/passwd"]}, r"config names '../../../etc/passwd', which is no file of the bundle"),
        ({"config": ["/etc/passwd"]}, "config names '/etc/passwd', which is no file of the bundle"),
        ({"experiment": "../tiny"}, r"experiment must be a name, not '\.\./tiny'"),
        ({"experiment": ".."}, r"experiment must be a name, not '\.\.'"),
        ({"experiment": 1}, r".*\(experiment is 1, not text\)"),
        ({"device": "cpu"}, r".*\(device is 'cpu', not a list\)"),
        ({"environment": {}}, r".*\(environment lacks packages\)"),
        ({"seeds": [1]}, r".*\(seeds is \[1\], not a mapping\)"),
        ({"needed": [{"path": "a"}]}, r".*\(needed\[0\] lacks for\)"),
        (
            {"needed": [{"for": "x", "path": "a", "bytes": "1"}]},
            r".*\(needed\[0\]\.bytes is '1', not a number or null\)",
        ),
        ({"version": 99}, "has version 99, and this Megaboa reads .*: use the Megaboa that wrote it, or a newer one"),
    ],
)
def test_a_broken_manifest_is_named_by_its_key_and_never_used(tmp_path, change, said):
    document = {name: value for name, value in {**plain(MANIFEST), **change}.items() if value is not None}
    bundle, out = bundle_of(tmp_path / "x.zip", {"bundle.json": json.dumps(document).encode()}), tmp_path / "out"
    with pytest.raises(InputError, match=rf"^{bundle}: bundle\.json: {said}"):
        reproduce(bundle, out, figures_only=True)
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", " is not valid JSON"),
        (b"[" * 100_000, " is not valid JSON"),
        (b"[]", ": can't be read as BundleManifest .it holds something else."),
    ],
)
def test_a_manifest_that_is_no_mapping_is_one_sentence(tmp_path, content, said):
    with pytest.raises(InputError, match=rf"x\.zip: bundle\.json{said}: it was made so, and is not used; ask"):
        opened(bundle_of(tmp_path / "x.zip", {"bundle.json": content}))


def test_nothing_compared_is_nothing_shown():
    with pytest.raises(InputError, match="has nothing to compare with"):
        show("figures", [])


def test_a_folder_of_the_users_is_refused_and_left_alone(tmp_path):
    bundle, mine = bundle_of(tmp_path / "x.zip", {}), tmp_path / "mine" / "report" / "thesis.tex"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(InputError, match=r"--into .*mine: exists, .* nothing in it was touched"):
        reproduce(bundle, tmp_path / "mine", figures_only=True)
    assert mine.read_text() == "mine" and list((tmp_path / "mine").rglob("*")) == [mine.parent, mine]


def test_a_new_an_empty_and_a_marked_folder_are_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new/deep", "empty"):
        claim(tmp_path / name)
        (tmp_path / name / "report").mkdir()
        claim(tmp_path / name)
        assert (tmp_path / name / MARKER).is_file()


@pytest.mark.parametrize("program", ["megaboa/__main__.py", "report.py"])  # of today, and of earlier bundles
def test_code_of_a_bundle_is_announced_and_sees_no_secrets(tmp_path, monkeypatch, capfd, program):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("DB_PASSWORD", "short")
    monkeypatch.setenv("HARMLESS", "seen")
    monkeypatch.setenv("TRACKER", "postgres://me:word@host")
    script = b"import os, sys; asked = 'HF_TOKEN DB_PASSWORD HARMLESS TRACKER'.split()\n"
    script += b"sys.exit(' '.join(name for name in asked if name in os.environ))"
    bundle = bundle_of(tmp_path / "x.zip", {f"workflow/scripts/{program}": script})
    with pytest.raises(InputError, match="the report could not be rebuilt"):
        reproduce(bundle, tmp_path / "out", figures_only=True)
    said = capfd.readouterr()
    assert said.out.startswith(f"code of {bundle} runs now as you") and said.err == "HARMLESS\n"


DRAW = b"""
import pathlib
data = pathlib.Path("results/tiny/report/data")
data.mkdir(parents=True)
(data / "same.tsv").write_text("x")
(data / "other.tsv").write_text("y")
"""


def test_it_says_which_files_are_equal_what_is_not_repeated_and_how_many(tmp_path, capfd):
    drawn = {f"results/tiny/report/data/{name}.tsv": b"x" for name in ("same", "other", "gone")}
    others = ("data/text.json", "data/text/sources.json", "data/indexes/ab12.json", "report/loss.pdf", "plan.tsv")
    others += ("tokenizers/bpe.json", "preflight.json", "specs/runs.json", "baseline/1/runs/a/run.json")
    of_run = ("run.json", "metrics/steps.parquet", "along/30/export.json")
    drawn |= {f"results/tiny/{name}": b"{}" for name in (*others, *(f"runs/a/{name}" for name in of_run))}
    on_gpus = canonical(plain(replace(MANIFEST, device=("cuda",)))).encode()
    script = {"workflow/scripts/megaboa/__main__.py": DRAW, "bundle.json": on_gpus}
    bundle = bundle_of(tmp_path / "x.zip", {**drawn, **script})
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", str(bundle), "--into", str(tmp_path / "out")])
    first, *lines = capfd.readouterr().out.splitlines()
    assert first.startswith(f"code of {bundle} runs now as you") and first.endswith(f"in {tmp_path}/out")
    assert [line.split() for line in lines[:4]] == [
        ["figures", "from", "the", "bundle's", "metrics:"],
        ["missing", "results/tiny/report/data/gone.tsv"],
        ["different", "results/tiny/report/data/other.tsv"],
        ["equal", "results/tiny/report/data/same.tsv"],
    ]
    assert lines[4].startswith("runs: not repeated, as they need GPUs: `snakemake --profile slurm` in a clone")
    assert ended.value.code == 1 and lines[5:] == [
        "1 of 3 files are equal, 0 of them but for measured times; not compared: data/*.json, data/*/sources.json, "
        "data/indexes/*.json, preflight.json, report/*.pdf, runs/*/along/*/export.json, runs/*/metrics/steps.parquet, "
        "runs/*/run.json, tokenizers/*.json"
    ]


def asking_for(tmp_path, *needed, **corpora):
    script = {"workflow/scripts/megaboa/__main__.py": DRAW, "results/tiny/report/data/same.tsv": b"x", "a.yaml": b"1"}
    script["bundle.json"] = canonical(plain(replace(MANIFEST, needed=needed))).encode()
    for name, spec in corpora.items():
        script[f"results/tiny/specs/corpora/{name}.json"] = canonical(plain(spec)).encode()
    return bundle_of(tmp_path / "x.zip", script)


def text(path, content, **more):
    return {"for": "corpora.text", "path": path, "bytes": len(content), "sha256": sha256(content).hexdigest(), **more}


def test_texts_are_compared_with_the_bundles_checksums_before_anything_is_trained(tmp_path, capfd):
    (tmp_path / "model").mkdir()
    known = [text(f"texts/{name}.txt", b"text") for name in ("lost", "longer", "other", "same")]
    model = {"for": "models.m.hf", "path": str(tmp_path / "model"), "digest": "d"}
    bundle, out = asking_for(tmp_path, *known, model), tmp_path / "out"
    for name, content in (("longer", "texts"), ("other", "toxt"), ("same", "text")):
        write_text(out / f"run/texts/{name}.txt", content)
    write_text(out / MARKER, "")
    with pytest.raises(
        SystemExit, match=r"^error: nothing was trained: put the missing files there, replace those that"
    ):
        main(["reproduce", str(bundle), "--into", str(out)])
    texts = out / "run/texts"
    assert capfd.readouterr().out.splitlines()[-3:] == [
        f"corpora.text: 1 of 4 files needed and not in the bundle is missing, such as {texts}/lost.txt",
        f"corpora.text: 2 of 4 files differ from the bundle's: {texts}/longer.txt (5 bytes, 4 in the bundle), "
        f"{texts}/other.txt (as long as in the bundle, and other content)",
        f"models.m.hf: reads 1 file outside the bundle, such as {tmp_path}/model: not compared",
    ]


@pytest.mark.parametrize("more", [1, 2])
def test_a_file_that_a_pattern_names_too_stops_before_anything_is_trained(tmp_path, capfd, more):
    """A saved dataset's and a hub's files have no pattern, and what was never listed isn't known."""
    out, others = tmp_path / "out", ["part2.txt", "part3.txt"][:more]
    for name in ("part0.txt", "part1.txt", *others):
        write_text(out / f"run/texts/{name}", name)
    write_text(out / MARKER, "")
    known = [text(f"texts/part{number}.txt", f"part{number}.txt".encode()) for number in (0, 1)]
    bundle = asking_for(
        tmp_path,
        *known,
        {"for": "corpora.unlisted", "path": "texts/*.txt"},
        text=made.corpus_spec(source=["texts/*.txt", "python-stdlib", "hf:a/b"]),
        unlisted=made.corpus_spec(name="unlisted", source="texts/*.txt"),
    )
    with pytest.raises(SystemExit, match="nothing was trained: move the additional files away, and call again"):
        main(["reproduce", str(bundle), "--into", str(out)])
    files = "1 file" if more == 1 else "2 files"
    listed = ", ".join(f"{out}/run/texts/{name}" for name in others)
    assert capfd.readouterr().out.splitlines()[-1] == f"corpora.text: {files} more than the experiment had: {listed}"
    for name in others:
        (out / "run/texts" / name).unlink()
    with pytest.raises(SystemExit, match=r"^error: the experiment did not run to its end"):
        main(["reproduce", str(bundle), "--into", str(out)])


def test_patterns_are_looked_for_in_folders_of_any_name(tmp_path, capfd):
    """Brackets are legal in the name of a folder, and mean something in a pattern."""
    out = tmp_path / "out[1]"
    write_text(out / MARKER, "")
    for name in ("part0.txt", "part1.txt"):
        write_text(out / f"run/texts/{name}", name)
    known, unlisted = text("texts/part0.txt", b"part0.txt"), {"for": "corpora.unlisted", "path": "texts/*.txt"}
    bundle = asking_for(tmp_path, known, unlisted, text=made.corpus_spec(source=["texts/*.txt"]))
    with pytest.raises(SystemExit, match="nothing was trained: move the additional files away, and call again"):
        main(["reproduce", str(bundle), "--into", str(out)])
    assert "corpora.unlisted: reads 1 file outside the bundle" in capfd.readouterr().out


def test_with_all_that_it_needs_it_trains(tmp_path, capfd):
    (tmp_path / "a.txt").write_text("text")
    named = {"for": "corpora.globbed", "path": str(tmp_path / "*.txt")}  # of a corpus without a list of its files
    bundle = asking_for(tmp_path, text(str(tmp_path / "a.txt"), b"text"), named)
    with pytest.raises(SystemExit, match=r"^error: the experiment did not run to its end; its results so far are in "):
        main(["reproduce", str(bundle), "--into", str(tmp_path / "out")])
    assert capfd.readouterr().out.splitlines()[-2:] == [
        f"corpora.text: reads 1 file outside the bundle, such as {tmp_path}/a.txt: as the bundle knows them",
        f"corpora.globbed: reads 1 file outside the bundle, such as {tmp_path}/*.txt: not compared",
    ]


@pytest.mark.parametrize("part", ["report", "run"])
def test_an_edited_file_is_never_overwritten(tmp_path, part):
    bundle, out = asking_for(tmp_path, text("lost.txt", b"text")), tmp_path / "out"
    with pytest.raises(InputError, match="put the missing files there"):
        reproduce(bundle, out, figures_only=False)
    edited = out / part / "a.yaml"
    edited.write_text("2")
    with pytest.raises(InputError, match=rf"out/{part}: a\.yaml differs from the bundle, .*copy this folder to one of"):
        reproduce(bundle, out, figures_only=False)
    assert edited.read_text() == "2"
    edited.unlink()
    with pytest.raises(InputError, match="put the missing files there"):
        reproduce(bundle, out, figures_only=False)
    assert edited.read_text() == "1"


def test_packages_of_other_versions_are_named():
    ours = importlib.metadata.version("pytest")
    made_with = BundleEnvironment(packages={"pytest": ours, "pandas": "0.1", "no-such-package": "1"})
    pandas = importlib.metadata.version("pandas")
    assert other_packages(replace(MANIFEST, environment=made_with)) == [
        "no-such-package: 1 in the bundle, none here",
        f"pandas: 0.1 in the bundle, {pandas} here",
    ]


def steps(path, loss=5.0, attempt=1, seconds=0.1):
    step = Step(step=1, attempt=attempt, time=1.0, seconds=seconds, loss=loss, tokens=8, grad_norm=1.0, lr=1e-3)
    write_steps(path, step_rows([step]))
    return path.read_bytes()


def verdict(name, ours, theirs):
    [one] = compare({name: ours}, {} if theirs is None else {name: theirs}, ["*"])
    return one.verdict


def test_steps_are_compared_to_the_last_bit_and_without_times(tmp_path):
    name, path = f"{RUN}/metrics/steps.parquet", tmp_path / "steps.parquet"
    ours = steps(path)
    assert verdict(name, ours, steps(path)) == "equal"
    assert verdict(name, ours, steps(path, seconds=0.2, attempt=2)) == WITHOUT_TIMES
    assert verdict(name, ours, steps(path, loss=5.000000000000001)) == "different"
    assert verdict(name, ours, b"PAR1 torn") == "different"
    assert verdict(name, ours, None) == "missing"


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ("run\tstep_seconds\na\t0.2\n", WITHOUT_TIMES),
        ("run\tstep_seconds\nb\t0.1\n", "different"),
        ("run\na\n", "different"),
        ("run\tstep_seconds\na\t0.1\n", "equal"),
    ],
)
def test_figures_data(theirs, expected):
    name = "results/tiny/report/data/step_time.tsv"
    ours = b"run\tstep_seconds\na\t0.1\n"
    assert verdict(name, ours, theirs.encode()) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ((), "equal"),
        (("PASS\t5.0\t0.1\t1", "PASS\t5.0\t0.2\t3"), WITHOUT_TIMES),  # seconds per step, and attempts
        (("PASS\t5.0", "PASS\t5.1"), "different"),
        (("PASS", "INVALID"), "different"),
    ],
)
def test_the_table_of_runs(change, expected):
    ours = "run\tstate\tloss.last\tstep_seconds\tattempts\na\tPASS\t5.0\t0.1\t1\n"
    theirs = ours.replace(*change) if change else ours
    assert verdict("results/tiny/report/tables/runs.tsv", ours.encode(), theirs.encode()) == expected


def test_of_a_measured_time_a_table_of_comparisons_has_only_the_name():
    name, head = "results/tiny/report/tables/baseline.tsv", "run\tquantity\tstate\tmeasured\n"
    ours = f"{head}a\tstep_seconds\tPASS\t0.1\na\tloss.last\tPASS\t5.0\n".encode()
    assert verdict(name, ours, ours.replace(b"PASS\t0.1", b"FAIL\t0.2")) == WITHOUT_TIMES
    assert verdict(name, ours, ours.replace(b"5.0", b"5.1")) == "different"
    assert verdict(name, ours, ours.replace(b"step_seconds", b"memory.measured_gib")) == "different"


def test_summaries_are_compared_without_times(tmp_path):
    def content(loss=5.0, seconds=0.1, **more):
        measured = {"step_seconds": Spread(median=seconds, p5=seconds, p95=seconds, n=1), "loss": Loss(last=loss)}
        return canonical(plain(Summary(run="a", state="PASS", steps=3, **measured, **more))).encode()

    name = f"{RUN}/metrics/summary.json"
    assert verdict(name, content(), content()) == "equal"
    assert verdict(name, content(), content(seconds=0.2, attempts=2)) == WITHOUT_TIMES
    assert verdict(name, content(), content(loss=4.0)) == "different"
    assert verdict(name, content(), content(skipped_steps=1)) == "different"
    earlier = [{"run": "a", "state": "PASS", "steps": 3, "attempts": number} for number in (1, 2)]
    first, second = (json.dumps(one).encode() for one in earlier)
    assert verdict(name, first, second) == WITHOUT_TIMES, "version 1.0.0 had no tokens_before"
    assert verdict(name, first, b'{"steps": 3}') == "different"


def test_evaluations_and_exports_along_are_compared_by_their_values():
    ours, along = (
        {"run": "a", "export": "1", "path": "/a", "iteration": 3, "values": {"acc": 0.5}},
        {"exports": [{"iteration": 3, "path": "/a", "digest": "1", "loss": 5.0, "values": {"acc": 0.5}}]},
    )
    for name, document in (("evaluation", ours), ("along/3/evaluation", ours), ("along", along)):
        content = json.dumps(document).encode()
        for old, new, expected in ((b"/a", b"/b", "equal"), (b"0.5", b"0.6", "different"), (b" 3", b" 4", "different")):
            assert verdict(f"{RUN}/{name}.json", content, content.replace(old, new)) == expected


def test_proofs_are_compared_by_their_checks():
    check = {"name": "files", "state": "PASS", "detail": "6 of 6", "difference": 1e-9}
    ours = {"state": "PASS", "checks": [check], "digest": "1"}
    for change, expected in (({"difference": 2e-9}, "equal"), ({"state": "FAIL"}, "different")):
        theirs = {**ours, "digest": "2", "checks": [check | change]}
        assert verdict(f"{RUN}/proof.json", json.dumps(ours).encode(), json.dumps(theirs).encode()) == expected


def test_a_page_is_compared_without_the_call_that_made_it():
    def page(loss, command):
        return f'<td>{loss}</td>\n<h2 id="provenance">How</h2>\n<pre><code>{command}</code></pre>'.encode()

    name = "results/tiny/report/index.html"
    assert verdict(name, page(5.0, "snakemake"), page(5.0, "snakemake -c 2")) == "equal"
    assert verdict(name, page(5.0, "snakemake"), page(4.0, "snakemake")) == "different"


def test_what_is_made_of_the_bundles_own_metrics_has_their_times():
    name = "results/tiny/report/tables/runs.tsv"
    files = [{name: f"run\tstep_seconds\na\t{seconds}\n".encode()} for seconds in (0.1, 0.2)]
    patterns, tables = _anchored(MANIFEST, OF_REPORT), _anchored(MANIFEST, TABLES)
    for exact, expected in (((), WITHOUT_TIMES), (tables, "different")):
        [one] = compare(*files, patterns, exact=exact)
        assert one.verdict == expected


def test_a_baselines_metrics_are_copied_and_not_compared():
    """They were counted as equal, and `not compared` named less than that."""
    names = [f"results/tiny/{place}/metrics/summary.json" for place in ("runs/a", "baseline/1/runs/a")]
    files = dict.fromkeys([*names, "config/results/tiny/runs/a/run.json"], b"{}")
    assert [one.name for one in compare(files, files, _anchored(MANIFEST, OF_RUN))] == names[:1]
    odd = replace(MANIFEST, experiment="tiny[1]")
    files = {"results/tiny[1]/runs/a/run.json": b"{}"}
    assert len(compare(files, files, _anchored(odd, OF_RUN))) == 1


def test_manifests_are_compared_by_what_they_say_was_made():
    ours = {"identity": "x", "iteration": 3, "world_size": 1, "store": "/a"}
    for change, expected in (({"store": "/b", "identity": "y"}, "equal"), ({"iteration": 4}, "different")):
        theirs = json.dumps({**ours, **change}).encode()
        assert verdict(f"{RUN}/train.json", json.dumps(ours).encode(), theirs) == expected
    assert verdict(f"{RUN}/run.json", b"{}", b"{} ") == "different"


def test_exports_are_compared_without_their_card():
    ours = {"iteration": 3, "digest": "1", "files": {"README.md": "1", "model.safetensors": "2"}}
    for files, expected in (({"README.md": "9"}, "equal"), ({"model.safetensors": "9"}, "different")):
        theirs = {**ours, "digest": "9", "files": ours["files"] | files}
        assert verdict(f"{RUN}/export.json", json.dumps(ours).encode(), json.dumps(theirs).encode()) == expected


def test_checks_of_measured_times_may_differ():
    loss = {"name": "loss", "quantity": "loss.last", "state": "PASS", "measured": 5.0}
    time = {"name": "time", "quantity": "step_seconds", "state": "PASS", "measured": 0.1}
    checks = {"form": 1, "state": "PASS", "checks": [loss, time]}
    slower = {**checks, "state": "FAIL", "checks": [loss, {**time, "state": "FAIL", "measured": 0.2}]}
    higher = {**checks, "checks": [{**loss, "measured": 5.1}, time]}
    for theirs, expected in (
        (slower, WITHOUT_TIMES),
        (higher, "different"),
        ({**checks, "checks": [loss]}, "different"),
    ):
        given = json.dumps(checks).encode(), json.dumps(theirs).encode()
        assert verdict("results/tiny/report/checks.json", *given) == expected


def test_runs_that_start_from_checkpoints_of_others_are_not_repeated(tmp_path, capfd):
    runs = {
        "here": {"parent": {"experiment": "tiny", "run": "whole", "iteration": 5}},
        "there": {"parent": {"experiment": "family", "run": "whole", "iteration": 5}},
        "itself": {"parent": {"experiment": "tiny", "run": "itself", "iteration": 7}},
        "whole": {},
    }
    documents = {f"results/tiny/runs/{name}/run.json": json.dumps(run).encode() for name, run in runs.items()}
    script = {"workflow/scripts/megaboa/__main__.py": DRAW, "results/tiny/report/data/same.tsv": b"x"}
    bundle = bundle_of(tmp_path / "x.zip", {**documents, **script})
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", str(bundle), "--into", str(tmp_path / "out")])
    assert ended.value.code == 0 and capfd.readouterr().out.splitlines()[-2].endswith(
        "none of the bundle's runs makes: itself from tiny/itself@7, there from family/whole@5"
    )


def test_only_what_is_asked_for_is_compared():
    found = compare({"a.tsv": b"", "b.json": b""}, {"a.tsv": b""}, ["*.tsv"])
    assert [(one.name, one.good) for one in found] == [("a.tsv", True)]
