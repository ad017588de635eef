# The ranks' environment: Snakemake's own, or an image. The image file is not an output: Snakemake would delete it
# before a rebuild, while jobs read it. Its digest is in the manifest.
rule image:
    input:
        spec=planned("specs/image.json"),
        inside=ancient(planned.unchanged("specs/inside.json")),
    output:
        "<experiment>/image.json",
    log:
        "<experiment>/logs/image.log",
    localrule: True
    conda:
        "../../envs/pipeline.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa image --spec {input.spec} --inside {input.inside} --out {output} 2>&1 | tee -i {log}"
