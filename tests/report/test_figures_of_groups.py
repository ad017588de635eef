"""Figures of two models, two learning rates, three seeds and two validation sets: what a curve, a bar, a cell or a
panel is of, and what is said about it."""

import copy
import dataclasses
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from drawn_figures import drawn, drawn_by
from fake_runs import FakeExperiment
from pydantic import ValidationError

from megaboa.config.models.outputs import Figure
from megaboa.metrics import VALIDATION_SET
from megaboa.records import ExportedStep
from megaboa.report import kinds
from megaboa.report.contents import Contents
from megaboa.report.drawing import draw, of_spec
from megaboa.report.figures import LEARNING_RATE, STEP_TIME, standard_figures
from megaboa.report.frames import Frames
from megaboa.report.page import render
from megaboa.report.runs import load_runs

VALUES = {
    f"{model}-lr{lr}-seed{seed}": {"model": model, "optimizer.lr": lr, "training.seed": seed}
    for model in ("moe", "dense")
    for lr in (0.003, 0.001)
    for seed in (1, 2, 3)
}
LOSSES = {"kind": "line", "data": "validation", "x": "step", "y": "loss"}
EXPORTED = {"kind": "line", "data": "exports", "x": "step", "y": "value"}
PROVENANCE = {"versions": {}, "commit": None, "command": "snakemake", "config": []}
MEANS = {"kind": "line", "data": "steps", "x": "step", "y": "loss", "over": "training.seed"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    experiment = FakeExperiment(tmp_path_factory.mktemp("ablation"))
    for name, values in VALUES.items():
        model, lr, seed = values.values()
        losses = {step: 5 - lr * 100 * step + seed / 10 + (model == "moe") for step in range(1, 21)}
        experiment.completed_run(name, steps=20, losses=losses, model=model)
        experiment.measure(name)
    found = load_runs(experiment.results)
    for run in found:
        lr = VALUES[run.name]["optimizer.lr"]
        run.steps["lr"] = lr / run.steps["step"]
        for entry in run.summary["validation"]:
            entry["losses"][f"{VALIDATION_SET}law"] = entry["losses"]["lm loss"] + 3
        run.summary["validation"][-1]["losses"]["lm loss"] = 7 - 100 * lr
    return found


@pytest.fixture(scope="module")
def frames(runs):
    return Frames(runs, VALUES)


@pytest.fixture(scope="module")
def uneven(runs):
    """Three seeds of one model, two of the other."""
    return Frames([run for run in runs if run.name not in ("moe-lr0.003-seed3", "moe-lr0.001-seed3")], VALUES)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def curves(axes):
    return [line for line in axes.lines if len(line.get_xdata())]


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Makes one own figure, as the report does; returns it with its files' folder."""
    monkeypatch.setattr("megaboa.report.figures.STANDARD", ())
    monkeypatch.setattr("megaboa.report.style.KINDS", ("svg",))

    def make(frames, **given):
        found = draw(frames._runs, (), (), {}, tmp_path, frames, own=[Figure(name="mine", **given)])
        return next(figure for figure in found if figure.name == "mine")

    return make


@pytest.mark.parametrize("look", [{}, {"hue": "set"}, {"hue": "model", "dash": "set"}, {"hue": "model"}], ids=str)
def test_each_validation_set_of_a_run_has_a_curve_of_its_own(frames, look):
    [axes], table = drawn(frames, **LOSSES, **look)
    assert [line.get_xdata().tolist() for line in curves(axes)] == [[10, 20]] * 24
    ends = {tuple(line.get_ydata()) for line in curves(axes)}
    assert ends == {tuple(part["loss"]) for _, part in table.groupby(["run", "set"])}
    plain = [(line.get_color(), str(line._dash_pattern)) for line in curves(axes)]
    assert len(set(plain)) == (2 if look == {"hue": "set"} else 4), "what the legend lists is what is drawn"
    entries = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert {"main", "law"} <= {entry.removeprefix("set ") for entry in entries}


def test_a_set_that_a_filter_or_panels_name_has_no_dash(frames):
    for given in ({"filter": {"set": "law"}}, {"facet": "set"}):
        panels, _ = drawn(frames, **LOSSES, **given)
        assert {line.get_linestyle() for axes in panels for line in axes.lines} == {"-"}
        assert all(len(curves(axes)) == 12 for axes in panels)


def test_means_are_not_over_validation_sets(frames):
    given = {**LOSSES, "hue": "optimizer.lr", "over": "training.seed", "filter": {"model": "dense"}}
    [axes], table = drawn(frames, **given)
    assert len(curves(axes)) == 4 and set(table["n"]) == {3} and set(table["set"]) == {"main", "law"}


def test_distributions_of_very_many_runs_are_of_one_set_each():
    names = [f"r{index:02d}" for index in range(30)]
    rows = [(name, step, of, index + of) for index, name in enumerate(names) for step in (1, 2) for of in (0, 1000)]
    many = Frames([], {})
    many.runs = pd.DataFrame({"run": names, "model": "dense"})
    many.validation = pd.DataFrame(rows, columns=["run", "step", "set", "loss"]).assign(
        set=lambda table: table["set"].map({0: "main", 1000: "law"})
    )
    [axes], table = drawn(many, **LOSSES)
    assert table[["set", "step", "median"]].to_numpy().tolist() == [
        ["main", 1, 14.5],
        ["main", 2, 14.5],
        ["law", 1, 1014.5],
        ["law", 2, 1014.5],
    ]
    assert [line.get_label() for line in axes.lines] == [
        *("median of 30 runs, main", "median of 30 runs, law"),
        *("r00, main", "r29, main", "r00, law", "r29, law"),
    ]


@pytest.mark.parametrize(
    ("given", "note"),
    [
        (MEANS, "Mean over training.seed (n = 3) with its 95% confidence interval."),
        (
            MEANS | {"hue": "optimizer.lr"},
            "Mean over training.seed and model (n = 6) with its 95% confidence interval.",
        ),
        (MEANS | {"hue": "optimizer.lr", "facet": "model"}, "Mean over training.seed (n = 3)"),
        (MEANS | {"hue": "optimizer.lr", "filter": {"model": "moe"}}, "Mean over training.seed (n = 3)"),
        (MEANS | {"hue": "optimizer.lr", "dash": "model"}, "Mean over training.seed (n = 3)"),
        (
            MEANS | {"over": "optimizer.lr"},
            "Mean over optimizer.lr and training.seed (n = 6) with its 95% confidence interval.",
        ),
        (
            {"kind": "line", "x": "optimizer.lr", "y": "loss.last", "hue": "model", "over": "training.seed"},
            "Mean over training.seed (n = 3)",
        ),
        (
            {"kind": "bar", "x": "optimizer.lr", "y": "loss.last"},
            "Median (bar), least to most (line), n = 6, over model and training.seed.",
        ),
        ({"kind": "bar", "x": "run", "y": "loss.last"}, ""),
        (
            LOSSES | {"kind": "bar", "x": "model"},
            "Median (bar), least to most (line), n = 24, over optimizer.lr, training.seed, set and step.",
        ),
        (
            LOSSES | {"kind": "bar", "x": "setting", "filter": {"set": "law", "step": 20, "training.seed": [1, 2]}},
            "Median (bar), least to most (line), n = 2, over training.seed.",
        ),
        (
            LOSSES | {"hue": "model", "dash": "optimizer.lr"},
            "A line for each set of a run: `hue`, `dash` or `facet` can tell them apart.",
        ),
        (LOSSES | {"hue": "model"}, ""),
        (
            {"kind": "bar", "x": "run", "y": "step_seconds"},
            "Median (bar), and the 5th to 95th percentile of a run's steps (line).",
        ),
        (
            {"kind": "box", "x": "optimizer.lr", "y": "loss.last", "hue": "model"},
            "Quartiles and median (box), 5th to 95th percentile (line), n = 3, over training.seed.",
        ),
        (
            {"kind": "heat", "x": "optimizer.lr", "y": "model", "value": "loss.last"},
            "A cell is a mean, n = 3, over training.seed.",
        ),
        (
            {"kind": "heat", "x": "optimizer.lr", "y": "setting", "value": "loss.last", "filter": {"training.seed": 1}},
            "",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else None,
)
def test_the_note_says_over_what_a_mean_a_bar_or_a_cell_is(frames, shown, given, note):
    found = shown(frames, caption="Mine", **given).note
    assert found.startswith(note) and bool(found) == bool(note)


def test_the_note_of_unequal_numbers_of_seeds_says_what_each_band_is(uneven, runs, shown):
    given = {"caption": "Mine", **MEANS}
    assert shown(uneven, **given).note == (
        "Mean over training.seed (n = 2 to 3) with its 95% confidence interval; the band where n = 2 spans both values."
    )
    two = Frames([run for run in runs if not run.name.endswith("seed3")], VALUES)
    assert shown(two, **given).note == "Mean over training.seed (n = 2); the band spans both values."
    one = [run for run in runs if run.name != "moe-lr0.003-seed2" and not run.name.endswith("seed3")]
    assert shown(Frames(one, VALUES), **given).note == (
        "Mean over training.seed (n = 1 to 2); the band where n = 2 spans both values; there is none where n = 1."
    )


def test_ends_of_bars_of_several_runs_are_no_percentiles(frames):
    _, table = drawn(frames, kind="bar", x="model", y="step_seconds", filter={"training.seed": [1, 2]})
    assert list(table) == ["model", "step_seconds", "step_seconds.least", "step_seconds.most", "n"]
    seconds = frames.runs[frames.runs["training.seed"] < 3].groupby("model")["step_seconds"]
    assert table["step_seconds.least"].tolist() == seconds.min()[table["model"]].tolist()
    assert table["step_seconds.most"].tolist() == seconds.max()[table["model"]].tolist()
    _, table = drawn_by(STEP_TIME, frames)
    assert list(table) == ["run", "step_seconds", "step_seconds.p5", "step_seconds.p95", "model", "n"]


def test_the_data_of_panels_names_the_panel(frames):
    _, table = drawn(frames, **MEANS, hue="optimizer.lr", facet="model")
    assert table.groupby("model", sort=False).size().to_dict() == {"moe": 40, "dense": 40}
    means = table[table["step"] == 20].set_index(["model", "optimizer.lr"])["mean"]
    assert means["moe", 0.001] == pytest.approx(means["dense", 0.001] + 1)
    for kind, further in (("bar", {"y": "loss.last"}), ("heat", {"y": "model", "value": "loss.last"})):
        _, table = drawn(frames, kind=kind, x="optimizer.lr", facet="training.seed", **further)
        assert set(table["training.seed"]) == {1, 2, 3}


def test_the_text_below_a_figure_counts_the_runs_that_it_shows(frames, shown, tmp_path):
    for given, count in (
        (MEANS | {"filter": {"model": "dense"}}, 6),
        ({"kind": "bar", "x": "model", "y": "loss.last", "filter": {"training.seed": [1, 3]}}, 8),
        ({"kind": "heat", "x": "optimizer.lr", "y": "model", "value": "loss.last", "filter": {"training.seed": 2}}, 4),
    ):
        shown(frames, **given)
        assert f"({count} runs that passed)" in (tmp_path / "mine.txt").read_text()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (LOSSES | {"filter": {"set": "wikitext"}}, "no run has set wikitext; there are main, law."),
        (
            {"kind": "bar", "x": "run", "y": "loss.last", "filter": {"optimizer.lr": [0.01, 0.03]}},
            "no run has optimizer.lr 0.01 or 0.03; there are 0.003, 0.001.",
        ),
        (
            LOSSES | {"filter": {"step": 10, "run": "dense-lr0.001-seed1", "model": "moe"}},
            "no row has all values of `filter`.",
        ),
        (
            {"kind": "line", "data": "exports", "x": "step", "y": "value"},
            "no run has rows of `data: exports`.",
        ),
        (
            {
                "kind": "scatter",
                "x": "run",
                "y": "energy.watts_per_gpu",
                "filter": {"model": "moe", "training.seed": 1},
            },
            "no value of watts per GPU in runs moe-lr0.003-seed1, moe-lr0.001-seed1.",
        ),
    ],
)
def test_a_figure_of_nothing_says_why(frames, shown, tmp_path, given, why):
    found = shown(frames, **given)
    assert found.note == f"mine has nothing to show: {why}" and not found.svg and not (tmp_path / "mine.svg").exists()
    html = render(Contents("t", "e", frames._runs, drawn=[found], provenance=PROVENANCE))
    assert f'<figure id="figure-mine" class="page">    <figcaption>{found.caption} {found.note}</figcaption>' in html


def test_panels_have_the_order_of_the_plan_and_one_scale(frames):
    panels, _ = drawn(frames, **MEANS, hue="optimizer.lr", facet="model")
    assert [axes.get_title() for axes in panels] == ["model moe", "model dense"]
    assert panels[0].get_ylim() == panels[1].get_ylim()
    panels, _ = drawn(frames, kind="bar", x="training.seed", y="loss.last", facet="optimizer.lr")
    assert [axes.get_title() for axes in panels] == ["learning rate 0.003", "learning rate 0.001"]
    assert panels[0].get_xlim() == panels[1].get_xlim()
    given = {"kind": "heat", "x": "optimizer.lr", "y": "training.seed", "value": "loss.last", "facet": "model"}
    panels, table = drawn(frames, **given)
    clims = [axes.collections[0].get_clim() for axes in panels if axes.get_title()]
    assert clims == [(table["loss.last"].min(), table["loss.last"].max())] * 2


def test_panels_of_different_quantities_have_scales_of_their_own(runs):
    frames = Frames(runs, VALUES)
    rows = [(run.name, step, "loss", 5.0 - step) for run in runs for step in (1, 2)]
    rows += [(run.name, step, "accuracy", step / 10) for run in runs for step in (1, 2)]
    frames.exports = pd.DataFrame(rows, columns=["run", "step", "name", "value"])
    exports = standard_figures(frames)[-1]
    figure, _ = drawn_by(exports, frames)
    assert [axes.get_title() for axes in figure.axes] == ["loss", "accuracy"]
    assert figure.axes[0].get_ylim()[1] > 3 > 1 > figure.axes[1].get_ylim()[1]
    [axes], _ = drawn(frames, kind="line", data="exports", x="step", y="value")
    assert len(curves(axes)) == 24


def drawn_points(line):
    return [None if np.isnan(y) else y for y in line.get_ydata()]


def test_a_score_that_is_not_finite_or_is_lacking_is_a_gap_in_the_curve_along_the_training(runs):
    """The line went on over the gap, as if the checkpoint in it had not been evaluated."""
    found = [({"acc": 0.0, "f": 0.5}, {}), ({"f": 0.5}, {"acc": "nan"}), ({"acc": 0.2}, {}), ({"acc": 0.3, "f": 1}, {})]
    steps = tuple(
        ExportedStep(iteration=step, path="p", digest="1", loss=None, values=values, not_finite=wrong)
        for step, (values, wrong) in enumerate(found)
    )
    along = [dataclasses.replace(run, along=steps) for run in runs[:7]]
    panels, table = drawn(Frames(along[:1], VALUES), **EXPORTED, facet="name")
    lines = {axes.get_title(): curves(axes) for axes in panels}
    assert {title: drawn_points(line) for title, [line] in lines.items()} == {
        "acc": [0, None, 0.2, 0.3],
        "f": [0.5, 0.5, None, 1],
    }
    assert table["value"].isna().sum() == 2
    [axes], _ = drawn(Frames(along, VALUES), **EXPORTED, filter={"name": "acc"})
    assert len(curves(axes)) == 1, "equal curves of many runs are one, also with gaps"
    many = tuple(dataclasses.replace(steps[step % 2], iteration=step) for step in range(30))
    [axes], _ = drawn(Frames([dataclasses.replace(runs[0], along=many)], VALUES), **EXPORTED, filter={"name": "acc"})
    assert curves(axes)[0].get_marker() == "o", "between gaps a line alone would not be seen"
    lost = (dataclasses.replace(steps[1], values={}),)
    of_lost = Frames([dataclasses.replace(runs[0], along=lost)], VALUES)
    assert of_spec(Figure(name="mine", **EXPORTED), of_lost) is None


def test_a_validation_loss_that_is_not_finite_is_a_gap(runs):
    run = dataclasses.replace(runs[0], summary=copy.deepcopy(runs[0].summary))
    first = run.summary["validation"][0]["losses"]
    last, known = run.summary["validation"][-1]["losses"], first["lm loss"]
    first["lm loss"] = None
    given = LOSSES | {"filter": {"set": "main"}, "direct": True}
    [axes], _ = drawn(Frames([run, *runs[1:3]], VALUES), **given)
    assert [drawn_points(line)[0] is None for line in curves(axes)] == [True, False, False]
    assert drawn_points(curves(axes)[0])[-1] == last["lm loss"]
    first["lm loss"], last["lm loss"] = known, None
    [axes], _ = drawn(Frames([run, *runs[1:3]], VALUES), **given)
    assert len(axes.texts) == 3 and all(np.isfinite(text.xy[1]) for text in axes.texts), "a name next to each curve"


def test_of_very_many_curves_a_gap_counts_for_nothing(runs, shown, tmp_path):
    lost = ({}, {"acc": "nan"})
    along = [
        tuple(
            ExportedStep(iteration=step, path="p", digest="1", loss=None, values=values, not_finite=wrong)
            for step, (values, wrong) in enumerate([({"acc": number / 10}, {}), lost if number else ({"acc": 7}, {})])
        )
        for number in range(30)
    ]
    many = [dataclasses.replace(runs[0], name=f"r{number}", along=steps) for number, steps in enumerate(along)]
    assert shown(Frames(many), **EXPORTED).note.startswith("Of 30 runs the median")
    table = pd.read_csv(tmp_path / "data" / "mine.tsv", sep="\t")
    assert table["n"].tolist() == [30, 1] and table["median"].tolist()[1] == 7


def test_panels_that_are_left_out_are_told_of_and_close_values_are_two_panels(runs, shown):
    frames = Frames(runs, {run.name: {"optimizer.lr": 0.001 + 1e-9 * index} for index, run in enumerate(runs)})
    panels, _ = drawn(frames, kind="scatter", x="loss.last", y="loss.first", facet="optimizer.lr")
    assert [axes.get_title() for axes in panels[:2]] == ["learning rate 0.001", "learning rate 0.001000001"]
    assert len(panels) == 12 and {len(axes.collections[0].get_offsets()) for axes in panels} == {1}
    more = [*runs, *(dataclasses.replace(run, name=f"{run.name}-b") for run in runs[:2])]
    values = {run.name: {"optimizer.lr": 0.001 * (index + 1)} for index, run in enumerate(more)}
    given = {"kind": "scatter", "x": "loss.last", "y": "loss.first", "facet": "optimizer.lr"}
    assert shown(Frames(more, values), caption="Mine", **given).note == "The first 12 of 14 panels."


@pytest.mark.parametrize("log", [[], ["x"]])
@pytest.mark.parametrize("form", ["page", "one-column"])
def test_learning_rates_below_small_panels_do_not_lie_on_each_other(frames, log, form):
    given = {"kind": "scatter", "x": "optimizer.lr", "y": "loss.last", "facet": "model", "log": log, "format": form}
    panels, _ = drawn(frames, **given)
    figure = panels[0].figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    labels = [
        text.get_window_extent(renderer)
        for axes in panels
        for text in axes.get_xticklabels() + axes.get_xticklabels(minor=True)
        if text.get_text() and axes.get_xlim()[0] <= text.get_position()[0] <= axes.get_xlim()[1]
    ]
    labels.sort(key=lambda box: box.x0)
    assert len(labels) >= 4 and all(left.x1 < right.x0 for left, right in pairwise(labels))


@pytest.mark.parametrize("models", [1, 2])
def test_equal_learning_rates_of_many_runs_share_a_curve_that_names_them(runs, models):
    some = [run for run in runs if models == 2 or run.model == "dense"]
    figure, table = drawn_by(LEARNING_RATE, Frames(some, VALUES))
    [axes] = figure.axes
    assert len(axes.lines) == 2 and table["run"].nunique() == len(some)
    first = "moe" if models == 2 else "dense"
    assert axes.lines[0].get_label().startswith(f"{first}-lr0.003-seed1, {first}-lr0.003-seed2, ")
    assert len({line.get_color() for line in axes.lines}) == 2
    assert len(figure.legends[0].get_texts()) == 2


def test_equal_learning_rates_of_very_many_runs_are_few_curves():
    names = [f"r{index:02d}" for index in range(30)]
    many = Frames([], {})
    many.runs = pd.DataFrame({"run": names, "model": "dense"})
    rows = [(name, step, index % 3 + step) for index, name in enumerate(names) for step in (1, 2)]
    many.steps = pd.DataFrame(rows, columns=["run", "step", "lr"])
    figure, table = drawn_by(LEARNING_RATE, many)
    assert [line.get_label() for line in figure.axes[0].lines] == [
        f"r0{index}, r0{index + 3}, r0{index + 6} and 7 more" for index in range(3)
    ]
    assert len({line.get_color() for line in figure.axes[0].lines}) == 3 and len(table) == 60


def test_an_optimum_of_an_evaluation_has_to_say_which_value_is_best(frames):
    given = {"name": "best", "kind": "scatter", "x": "optimizer.lr", "y": "evaluation.nll", "fit": "optimum"}
    with pytest.raises(ValidationError, match=r"can't know which evaluation\.nll is best: set `best: lowest` or"):
        Figure(**given)
    swept = Frames([], {})
    rates = np.geomspace(1e-4, 1e-2, 9)
    nll = 3 + np.log(rates / 1e-3) ** 2
    swept.runs = frames.runs.head(9).assign(**{"optimizer.lr": rates, "evaluation.nll": nll})
    lowest, highest = (of_spec(Figure(**given, best=best), swept).fits[""] for best in ("lowest", "highest"))
    assert lowest.constants[0].value == pytest.approx(1e-3)
    assert lowest.sentence.startswith("Optimum (lowest nll) by a parabola")
    assert "(highest nll)" in highest.why


def test_best_decides_colours_and_which_bars_are_shown(frames, monkeypatch):
    heat = {"kind": "heat", "x": "optimizer.lr", "y": "model", "value": "evaluation.nll"}
    evaluated = Frames(frames._runs, VALUES)
    evaluated.runs = frames.runs.assign(**{"evaluation.nll": range(12)})
    colours = {
        best: drawn(evaluated, **heat, best=best)[0][0].collections[0].cmap.name for best in ("lowest", "highest")
    }
    assert colours == {"lowest": "viridis", "highest": "viridis_r"}
    monkeypatch.setattr(kinds, "MOST_BARS", 2)
    bars = {"kind": "bar", "x": "run", "y": "evaluation.nll"}
    assert drawn(evaluated, **bars, best="lowest")[1]["evaluation.nll"].tolist() == [0, 1]
    assert drawn(evaluated, **bars)[1]["evaluation.nll"].tolist() == [11, 10]
    with pytest.raises(ValidationError, match="best belongs to `fit: optimum`, bars and heat maps: remove it"):
        Figure(name="mine", **LOSSES, best="lowest")


def test_the_heat_map_of_a_sweep_says_that_its_cells_are_means(runs, shown, tmp_path):
    values = {run.name: {"optimizer.lr": 1e-3 * (i % 2 + 1), "training.global_batch_size": 8 * (i // 2 % 2 + 1)}
              for i, run in enumerate(runs)}  # fmt: skip
    values = {name: given | {"training.seed": i // 4} for i, (name, given) in enumerate(values.items())}
    dense = Frames([dataclasses.replace(run, plan=run.plan | {"model": "dense"}) for run in runs], values)
    found = {one.name: one for one in draw(dense._runs, (), (), {"sweep": "Loss."}, tmp_path, dense)}
    assert found["sweep"].note == "A cell is a mean, n = 3, over training.seed."
    assert pd.read_csv(tmp_path / "data" / "sweep.tsv", sep="\t")["n"].tolist() == [3] * 4


def test_bars_of_negative_values_are_whole(runs):
    for number, run in enumerate(runs[:3]):
        run.evaluation["likelihood"] = (-1.0, -2.0, -0.5)[number]
    try:
        [axes], _ = drawn(Frames(runs[:3], VALUES), kind="bar", x="run", y="evaluation.likelihood", best="highest")
        assert axes.get_xlim() == pytest.approx((-2.4, 0))
    finally:
        for run in runs[:3]:
            run.evaluation.clear()


def test_a_score_called_p5_is_no_percentile_of_steps(runs, shown):
    scores = {"acc": 0.5, "acc.p5": 0.1, "acc.p95": 0.9}
    scored = [dataclasses.replace(run, evaluation=scores) for run in runs[:3]]
    assert shown(Frames(scored, VALUES), kind="bar", x="run", y="evaluation.acc").note == ""
