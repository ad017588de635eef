# `snakemake prove` plans another experiment (plan/proof.py): N + M steps in one go, and N, a stop, and M more, in this
# layout and in another. Its runs, and any others that an agreement with `tensors` names, are compared here.
rule prove:
    input:
        lambda wildcards: configuration.compared(SHARED),
        "<experiment>/report/index.html",
        SHARED.metrics,  # as for `all`


rule compare_tensors:
    input:
        SHARED.compared,
        image=SHARED.image_manifest,
        spec=planned("specs/tensors.json"),
    output:
        "<experiment>/tensors.json",
    log:
        "<experiment>/logs/tensors.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    resources:
        mem_mb=SHARED.compared_mb,
    params:
        scripts=SCRIPTS,
        python=PYTHON,
    shell:
        "{params.python} {params.scripts:q}/megaboa compare-tensors --spec {input.spec} --out {output} 2>&1 | tee -i {log}"
