"""The files that a recipe consists of, read from its code."""

from megaboa import recipe_files


def files(folder, **code):
    """Write modules, of which `a` is the recipe; return the names of those that belong to it."""
    for name, text in code.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [path.relative_to(folder).as_posix() for path in recipe_files.files_of(str(folder / "a.py"))]


def test_a_recipe_alone_is_one_file(tmp_path):
    assert files(tmp_path, a="import torch\nfrom megatron.core import b\n", b="") == ["a.py"]
    assert recipe_files.modules_of(str(tmp_path / "a.py")) == []


def test_what_it_imports_belongs_to_it_and_what_that_imports_too(tmp_path):
    found = files(tmp_path, a="def f():\n    from c import x\n", b="import a", c="import b, torch", d="import a")
    assert found == ["a.py", "b.py", "c.py"]
    assert recipe_files.modules_of(str(tmp_path / "a.py")) == ["b", "c"]


def test_packages_and_what_is_imported_within_them(tmp_path):
    (tmp_path / "p/q").mkdir(parents=True)
    (tmp_path / "p/__init__.py").write_text("from .one import x")
    (tmp_path / "p/q/__init__.py").write_text("from ..two import y")
    found = files(tmp_path, a="import p.q", p__one="from . import three", p__two="", p__three="", p__four="")
    assert found == ["a.py", "p/__init__.py", "p/one.py", "p/q/__init__.py", "p/three.py", "p/two.py"]
    assert recipe_files.modules_of(str(tmp_path / "a.py")) == ["p"]


def test_a_folder_without_an_init_is_a_package_too(tmp_path):
    assert files(tmp_path, a="from p import one", p__one="", p__two="") == ["a.py", "p/one.py"]


def test_what_is_no_python_belongs_to_it_and_imports_nothing(tmp_path):
    assert files(tmp_path, a="import b", b="import c (", c="") == ["a.py", "b.py"]


def test_what_its_code_assigns_to(tmp_path):
    files(tmp_path, a="import b\nc.d.e, f[0] = g.h, 1\nc.i += 1\n", b="c.j: int = 1\nk = c.l\n")
    assert recipe_files.assigned(str(tmp_path / "a.py")) == {"e", "i", "j"}
