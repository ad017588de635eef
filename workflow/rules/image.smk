# What the ranks run in. So far that is the environment in which Snakemake runs.
rule image:
    input:
        f"{RESULTS}/specs/image.json",
    output:
        f"{RESULTS}/image.json",
    log:
        f"{RESULTS}/logs/image.log",
    localrule: True
    conda:
        "../../envs/pipeline.yaml"
    shell:
        "cp {input} {output}.tmp > {log} 2>&1 && mv {output}.tmp {output}"
