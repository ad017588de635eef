# ruff: noqa: E501 (one case a line reads better)
"""Dockerfiles are understood as far as the plan needs it."""

import pytest

from megaboa.errors import InputError
from megaboa.image import dockerfile

TEXT = """\
# a comment
ARG BASE
FROM ${BASE} AS build
ARG VERSION
ARG EXTRA="no"
RUN first && \\
    # in between
    second "$VERSION"
COPY --chown=1:1 a/*.txt b /opt/
COPY --from=build /x /y
RUN <<EOT
FROM nowhere
EOT
FROM build
ADD ["c d", "/opt/"]
"""


@pytest.fixture
def context(tmp_path):
    for name in ("a/1.txt", "a/2.txt", "a/3.md", "b/deep/file", "c d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "Dockerfile").write_text(TEXT)
    return tmp_path


def test_instructions_and_their_lines(context):
    file = dockerfile.read(context / "Dockerfile")
    assert [(one.name, one.line) for one in file.instructions] == [
        *(("ARG", 2), ("FROM", 3), ("ARG", 4), ("ARG", 5), ("RUN", 6), ("COPY", 9), ("COPY", 10), ("RUN", 11)),
        *(("FROM", 14), ("ADD", 15)),
    ]
    assert file.bases == ["${BASE}"] and file.arguments == {"BASE": None, "VERSION": None, "EXTRA": "no"}
    assert "second" in file.instructions[4].text and "in between" not in file.instructions[4].text


def test_the_files_that_are_copied(context):
    found = dockerfile.read(context / "Dockerfile").copied(context)
    assert [str(path.relative_to(context)) for path in found] == ["a/1.txt", "a/2.txt", "b/deep/file", "c d"]


@pytest.mark.parametrize(
    ("line", "copied"),
    [
        ("COPY .config /c", [".config/x"]),
        ("COPY ./.config/ /c", [".config/x"]),
        ("COPY /a/1.txt /c", ["a/1.txt"]),
        ('COPY --chown=1 ["a/1.txt","c d", "/c/"]', ["a/1.txt", "c d"]),
        ("ADD https://example.org/x.tar /c", []),
        ("COPY ${PLACE}/1.txt $PLACE/3.md /c/", ["a/1.txt", "a/3.md"]),
        ("COPY --chown=1 --link b --odd /c", ["--odd", "b/deep/file"]),
    ],
)
def test_how_sources_can_be_written(context, line, copied):
    (context / ".config").mkdir()
    for name in (".config/x", "--odd"):
        (context / name).touch()
    (context / "Dockerfile").write_text(f"FROM a\nARG PLACE=a\n{line}\n")
    found = dockerfile.read(context / "Dockerfile").copied(context, {"PLACE": "a"})
    assert [str(path.relative_to(context)) for path in found] == copied


def test_what_the_builder_ignores_is_no_input(context):
    (context / ".dockerignore").write_text("# ours\nb/\n**/*.txt\n!a/2.txt\n/Dockerfile\n.docker*\n")
    (context / "Dockerfile").write_text("FROM a\nCOPY . /src\n")
    before = dockerfile.inputs(dockerfile.read(context / "Dockerfile"), context, {})
    assert sorted(before["files"]) == ["a/2.txt", "a/3.md", "c d"]
    (context / "b/deep/file").write_text("changed")
    assert dockerfile.inputs(dockerfile.read(context / "Dockerfile"), context, {}) == before


def test_values_of_arguments(context):
    file = dockerfile.read(context / "Dockerfile")
    pins = {"BASE": "debian@sha256:1", "VERSION": "1.2", "OTHER": "3"}
    assert dockerfile.arguments(file, pins, {}) == {"BASE": "debian@sha256:1", "VERSION": "1.2", "EXTRA": "no"}
    assert dockerfile.arguments(file, pins, {"VERSION": "2"})["VERSION"] == "2"
    with pytest.raises(InputError, match=r"ARG VERSION has no value: set image\.build\.args\.VERSION"):
        dockerfile.arguments(file, {"BASE": "x"}, {})
    with pytest.raises(InputError, match="has no ARG VERSON; it has BASE, VERSION, EXTRA"):
        dockerfile.arguments(file, pins, {"VERSON": "2"})


def test_any_input_makes_another_image_and_nothing_else_does(context):
    def inputs(**args):
        return dockerfile.inputs(dockerfile.read(context / "Dockerfile"), context, {"VERSION": "1", **args})

    before = inputs()
    (context / "a/3.md").write_text("not copied")
    (context / "a/1.txt").touch()
    assert inputs() == before
    assert inputs(VERSION="2") != before
    (context / "b/deep/file").write_text("changed")
    assert inputs() != before


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "has no FROM"), ("FROM a\nCOPY none /x\n", "Dockerfile:2: COPY none: nothing of that name"), (None, "can't be read")],
)  # fmt: skip
def test_what_can_not_be_built(tmp_path, text, said):
    path = tmp_path / "Dockerfile"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=said):
        dockerfile.read(path).copied(tmp_path)
