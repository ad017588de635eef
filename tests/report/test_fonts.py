"""megaboa.report.fonts: characters that the figures' own font lacks."""

import matplotlib.pyplot as plt
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager

from megaboa.report import fonts, style


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A font that has one Chinese character, installed after matplotlib has listed the machine's fonts."""
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for point in ((0, 900), (900, 900), (900, 0)):
        pen.lineTo(point)
    pen.closePath()
    builder = FontBuilder(1000)
    builder.setupGlyphOrder([".notdef", "sun"])
    builder.setupCharacterMap({ord("日"): "sun"})
    builder.setupGlyf({name: pen.glyph() for name in (".notdef", "sun")})
    builder.setupHorizontalMetrics(dict.fromkeys((".notdef", "sun"), (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": "Suns", "styleName": "Regular", "psName": "Suns"})
    builder.setupOS2()
    builder.setupPost()
    path = tmp_path / "suns.ttf"
    builder.save(path)
    known = list(font_manager.fontManager.ttflist)
    monkeypatch.setattr(fonts, "findSystemFonts", lambda: [str(path), str(tmp_path / "none.ttf")])
    fonts._warn.cache_clear()
    yield
    font_manager.fontManager.ttflist[:] = known


@pytest.mark.parametrize(("name", "said"), [("日", ""), ("日本", "no font on this machine has 本, so")])
def test_names_in_other_scripts_are_set_in_an_installed_font(installed, tmp_path, capsys, recwarn, name, said):
    style.apply_style()
    figure, axes = plt.subplots()
    axes.bar([name, "b"], [1, 2])
    svg = style.save(figure, tmp_path, "named")
    shown = capsys.readouterr().err
    assert said in shown and bool(said) is bool(shown) and not recwarn.list
    assert name in svg and "Suns" not in svg, "the page sets it in its own fonts"
    embedded = b"Suns" in (tmp_path / "named.pdf").read_bytes()
    assert embedded


def test_other_figures_need_no_other_font(tmp_path, monkeypatch):
    monkeypatch.setattr(fonts, "findSystemFonts", lambda: pytest.fail("not asked for"))
    style.apply_style()
    figure, axes = plt.subplots()
    axes.bar(["é", "β"], [1, 2])
    style.save(figure, tmp_path, "named")
