"""benchmarks/structure.py: which untyped mappings cross rooms."""

import structure


def test_private_functions_of_a_module_that_is_imported_as_a_whole_cross_no_rooms(tmp_path):
    library = tmp_path / structure.LIBRARY
    for room, text in {
        "a": "def shown(x: dict[str, Any]): ...\ndef _own(x: dict[str, Any]): ...\n",
        "b": "from megaboa.a import one\n",
    }.items():
        (library / room).mkdir(parents=True)
        (library / room / "one.py").write_text(text)
    counted = structure.count(tmp_path)
    assert counted[f"functions with `{structure.LOOSE}` in signatures that other rooms import"] == 1
    assert counted["modules of the library"] == 2
