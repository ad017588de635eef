import json

from megaboa.bundle.contents import code_state


# Not part of `all`: everything a reader needs to check the experiment, in one file.
rule bundle:
    input:
        f"<experiment>/bundle/{PLAN.name}.crate.zip",
        lambda wildcards: SHARED.manifests,  # as for `all`


rule pack_bundle:
    input:
        "<experiment>/report/index.html",
        "<experiment>/report/checks.json",
        SHARED.metrics,
        "<experiment>/preflight.json",
        settings=planned("specs/report.json"),
    output:
        f"<experiment>/bundle/{PLAN.name}.crate.zip",
    log:
        "<experiment>/logs/bundle.log",
    localrule: True
    conda:
        "../../envs/pipeline.yaml"
    params:
        scripts=SCRIPTS,
        # Functions, because Snakemake takes braces of other values for wildcards.
        store=lambda wildcards: PLAN.experiment.store,
        config=lambda wildcards: [os.path.relpath(path) for path in CONFIG_FILES],
        command_line=lambda wildcards: json.dumps(
            nested(command_line(GIVEN), LOADED.raw)
        ),
        code=lambda wildcards: code_state(),  # a change of the code makes the bundle again
    shell:
        "python {params.scripts:q}/megaboa bundle --settings {input.settings} --store {params.store:q}"
        " --config-file {params.config:q} --command-line {params.command_line:q} --out {output} 2>&1 | tee -i {log}"
