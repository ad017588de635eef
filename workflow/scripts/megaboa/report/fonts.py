"""Fonts for characters that the figures' own font lacks, such as Chinese names of runs or of evaluations' values."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping

from matplotlib.figure import Figure as Drawing
from matplotlib.font_manager import findSystemFonts, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

OWN = "DejaVu Sans"
_LACKING = r"Glyph .* missing from font"  # as matplotlib warns
_SHOWN = 20  # characters


def rendered(figure: Drawing, render: Callable[[Drawing], Mapping[str, bytes]]) -> Mapping[str, bytes]:
    """What `render` makes of a figure, in installed fonts where the own one lacks characters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", _LACKING, UserWarning)
        try:
            return render(figure)
        except UserWarning:
            pass
    _set_in_installed_fonts(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _LACKING, UserWarning)
        return render(figure)


def _set_in_installed_fonts(figure: Drawing) -> None:
    """Set the texts of a drawn figure; warn of characters that no font has."""
    texts = figure.findobj(Text)
    lacking = {character for one in texts for character in one.get_text()} - _characters(fontManager.findfont(OWN))
    families = [OWN]
    for path in sorted(findSystemFonts()):  # fontManager's own list is as old as its cache
        if has := lacking & _characters(path):
            fontManager.addfont(path)
            families.append(FT2Font(path).family_name)
            lacking -= has
    for one in texts:
        one.set_fontfamily(families)
    if unseen := "".join(sorted(filter(str.isprintable, lacking)))[:_SHOWN]:
        _warn(unseen)


@functools.cache
def _characters(path: str) -> frozenset[str]:
    try:
        return frozenset(map(chr, FT2Font(path).get_charmap()))
    except (OSError, RuntimeError):  # a font that FreeType can't read
        return frozenset()


@functools.cache
def _warn(characters: str) -> None:
    print(
        f"warning: figures: no font on this machine has {characters}, so the PNG and PDF files show boxes there (the "
        "page doesn't): install a font that has them, such as Noto (Debian: fonts-noto-cjk), or rename them",
        file=sys.stderr,
    )
