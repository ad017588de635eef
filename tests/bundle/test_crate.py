"""The metadata of a bundle, by the requirements of Workflow Run Crate 0.5."""

from dataclasses import replace

import pytest

from megaboa.bundle.crate import metadata
from megaboa.records import BundleEnvironment, BundleManifest

MANIFEST = BundleManifest(
    experiment="tiny",
    config=("config/my file.yaml",),
    device=("cpu",),
    commit="abc",
    image={"runtime": "apptainer", "digest": "sha256:1234", "python": "3.12"},
    environment=BundleEnvironment(packages={"snakemake": "9.27"}),
)
FILES = {
    "Snakefile": b"rule all:\n",
    "LICENSE": b"Apache",
    "README.md": b"# x",
    "config/my file.yaml": b"a: 1\n",
    "envs/pipeline.txt": b"x==1\n",
    "results/tiny/runs/a/metrics/steps.parquet": b"PAR1",
    "results/tiny/report/data/loss.tsv": b"step\n",
}


@pytest.fixture
def crate():
    return metadata(FILES, MANIFEST, "Tiny", 1_700_000_000.5, 1_700_000_060.5)


@pytest.fixture
def entities(crate):
    return {entity["@id"]: entity for entity in crate["@graph"]}


def ids(value):
    return [one["@id"] for one in (value if isinstance(value, list) else [value])]


def test_the_metadata_file_describes_the_root(crate, entities):
    descriptor = entities["ro-crate-metadata.json"]
    assert descriptor["@type"] == "CreativeWork" and descriptor["about"] == {"@id": "./"}
    assert "https://w3id.org/ro/crate/1.1" in ids(descriptor["conformsTo"])
    assert crate["@context"][0] == "https://w3id.org/ro/crate/1.1/context"
    root = entities["./"]
    assert all(root[name] for name in ("name", "description", "datePublished", "license"))
    assert root["datePublished"] == "2023-11-14T22:14:20+00:00"


def test_the_root_names_its_profiles_and_all_files(entities):
    root = entities["./"]
    profiles = ids(root["conformsTo"])
    assert "https://w3id.org/ro/wfrun/workflow/0.5" in profiles and "https://w3id.org/ro/wfrun/process/0.5" in profiles
    assert all(entities[url]["@type"] == "CreativeWork" and entities[url]["version"] for url in profiles)
    assert len(ids(root["hasPart"])) == len(FILES)
    assert "config/my%20file.yaml" in ids(root["hasPart"])


def test_the_workflow_is_the_main_entity_and_the_instrument(entities):
    root = entities["./"]
    workflow = entities[root["mainEntity"]["@id"]]
    assert set(workflow["@type"]) == {"File", "SoftwareSourceCode", "ComputationalWorkflow"}
    assert entities[workflow["programmingLanguage"]["@id"]]["@type"] == "ComputerLanguage"
    [action] = [entities[name] for name in ids(root["mentions"])]
    assert action["@type"] == "CreateAction" and action["instrument"] == root["mainEntity"]
    assert set(ids(action["object"])) == {"config/my%20file.yaml", "envs/pipeline.txt"}
    assert "results/tiny/report/data/loss.tsv" in ids(action["result"])
    assert action["startTime"] < action["endTime"]
    image = entities[action["containerImage"]["@id"]]
    assert image["@type"] == "ContainerImage" and image["sha256"] == "1234"


def test_every_reference_leads_to_an_entity_or_out_of_the_crate(crate, entities):
    def references(value):
        if isinstance(value, dict):
            yield from [value["@id"]] if set(value) == {"@id"} else references(list(value.values()))
        elif isinstance(value, list):
            for item in value:
                yield from references(item)

    for entity in crate["@graph"]:
        for name in references([value for key, value in entity.items() if key != "@id"]):
            assert name in entities or name.startswith(("http://", "https://")), name
    assert len(entities) == len(crate["@graph"])


def test_without_a_container_there_is_no_image():
    without = replace(MANIFEST, image={"runtime": "none", "digest": "1"})
    crate = metadata(FILES, without, "Tiny", None, 0.0)
    assert not [entity for entity in crate["@graph"] if "containerImage" in entity or "startTime" in entity]
