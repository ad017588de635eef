"""The commands in README and docs: every target and option is one that Snakemake knows."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import grimp
import pytest
import yaml
from fake_runs import FakeExperiment
from snakemake.cli import get_argument_parser

import megaboa
from megaboa import causes
from megaboa.check import calibration
from megaboa.doctor.troubles import ADVICE
from megaboa.records import ReportSpec, write

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "docs/how-to", "docs/reference", "docs/explanation", "config", "recipes")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md"))])
PARTS = re.compile(r"```bash\n(.*?)```|`([^`\n]+)`", re.DOTALL)


def commands():
    """Each `snakemake ...` of the docs, in code blocks and in sentences, with its page."""
    for page in PAGES:
        for block, inline in PARTS.findall(page.read_text()):
            for line in (block or inline).splitlines():
                command = re.search(r"(?:^|\s)snakemake (-|[a-z]).*", line.split(" # ")[0])
                if command and page.name != "CHANGELOG.md":
                    words = shlex.split(command[0].split(" > ")[0])[1:]
                    yield pytest.param(words, id=f"{page.name}: {line.strip()}")


def rules():
    text = "".join(path.read_text() for path in [ROOT / "Snakefile", *ROOT.glob("workflow/rules/*.smk")])
    return {*re.findall(r"^rule (\w+):", text, re.MULTILINE), *re.findall(r'^    name:\s+"(\w+)"', text, re.MULTILINE)}


@pytest.mark.parametrize("words", list(commands()))
def test_every_command_of_the_docs_names_options_and_rules_that_there_are(words):
    given = get_argument_parser().parse_args(words)
    assert set(given.targets) <= rules(), given.targets
    assert {*(given.forcerun or [])} <= rules()
    for profile in given.profile or []:
        assert (ROOT / profile.removeprefix("../megaboa/") / "config.yaml").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_to_copy_that_run_jobs_name_a_profile(page):
    """Without one, Snakemake's own log fills the screen."""
    blocks = "".join(re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL))
    given = [line for line in blocks.splitlines() if re.match(r"(nohup )?snakemake ", line)]
    assert [line for line in given if " -n" not in line and "--profile" not in line] == []


def test_commands_that_edit_a_file_of_the_project_change_it():
    given = [
        found for page in PAGES for found in re.findall(r"^sed -i '([^']+)' (\S+)$", page.read_text(), re.MULTILINE)
    ]
    edits = [(script, ROOT / name) for script, name in given if (ROOT / name).exists()]
    assert edits
    for script, path in edits:
        assert subprocess.check_output(["sed", script, path], text=True) != path.read_text(), script


def test_the_commands_are_found():
    assert len(list(commands())) > 40


@pytest.mark.parametrize(
    "page", sorted({*PAGES, *ROOT.glob("docs/*/*.md")}), ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_to_files_and_their_headings(page):
    missing = []
    for link, heading in re.findall(r"\]\(([^()\s#]*)(?:#([^()\s]*))?\)", page.read_text()):
        target = page.parent / link if link else page
        if "://" in link or (target.exists() and (not heading or heading in anchors(target))):
            continue
        missing.append(f"{link}#{heading}")
    assert missing == []


def anchors(page):
    """Of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def cells(page):
    """The cells of a page's tables, row by row."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]


def test_every_cause_stands_in_the_tables_of_recovery_with_what_follows():
    tables = {
        (row[0].strip("`"), row[2], row[3].strip(" |")) for row in cells("explanation/recovery.md") if len(row) > 3
    }
    budget = {"stop": ""}
    wanted = {
        (name, end.action, budget.get(end.action, "no" if end.free else "yes")) for name, end in causes.CAUSES.items()
    }
    assert not wanted - tables, "docs/explanation/recovery.md lacks causes, or has another action or budget for them"


def test_every_class_of_the_doctor_stands_in_its_table():
    named = {name for row in cells("how-to/doctor.md") for name in re.split("[,;] ", row[0].lower())}
    assert not {name.replace("_", " ") for name in ADVICE} - named, "docs/how-to/doctor.md lacks classes"
    assert {end.trouble for end in causes.CAUSES.values()} <= ADVICE.keys()


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert [str(page) for page in pages if page.name != "README.md" and f"({page})" not in index] == []


def test_the_way_of_a_run_names_functions_that_there_are():
    text = (ROOT / "docs" / "explanation" / "a-run-through-the-code.md").read_text()
    named = re.findall(r"`([\w/]+\.py):(\w+)`", text)
    assert len(named) > 30
    for module, name in named:
        tree = ast.parse((ROOT / "workflow" / "scripts" / "megaboa" / module).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}, module


@pytest.mark.parametrize("table", ["layout", "metrics", "model_kinds", "causes"])
def test_the_four_tables_name_the_packages_that_read_them(table):
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    told = re.search(rf"^\| `{table}\.py` \|[^|]*\|([^|]*)\|", page, re.MULTILINE)[1]
    graph = grimp.build_graph("megaboa", cache_dir=None)
    readers = {name.split(".")[1] for name in graph.find_modules_that_directly_import(f"megaboa.{table}")}
    packages = {name for name in readers if (Path(megaboa.__file__).parent / name).is_dir()}
    assert set(told.strip().split(", ")) == packages, f"docs/explanation/architecture.md: who reads {table}.py"


def test_the_notebook_of_the_docs_reads_results(tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "reference" / "files.md").read_text(), re.DOTALL)[1]
    experiment = FakeExperiment(tmp_path)
    experiment.completed_run("a", steps=20)
    experiment.measure("a")
    asked = ReportSpec(title=None, agreements=(), proofs=(), values={"a": {"optimizer.lr": 0.1}})
    write(experiment.results / "specs" / "report.json", asked)
    monkeypatch.chdir(tmp_path)
    frames = {}
    exec(code, frames)
    assert capsys.readouterr().out.startswith("PASS ")
    assert frames["frames"].runs["optimizer.lr"].tolist() == [0.1] and len(frames["frames"].steps) == 20


def test_shown_predictions_name_the_calibration_that_is_shipped():
    shown = [
        said
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.parent.name != "benchmarks"  # has results of their day
        for said in re.findall(r"predicted by ((h200|h100|a100|b200)[^()\n]*\(off by \d+%)", page.read_text())
    ]
    assert len(shown) >= 7
    for text, gpu in shown:
        name = calibration.short(f"{gpu}-80g", is_uncertain=False)
        assert text in (name.rstrip(")"), calibration.short(f"{gpu}-80g", is_uncertain=True).rstrip(")"))


def test_one_version_is_said_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+), (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation["version"] == megaboa.__version__ == newest[1]
    assert str(citation["date-released"]) == newest[2]
