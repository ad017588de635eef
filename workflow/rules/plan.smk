# The plan's table and the runs' files are written when the Snakefile is read: `snakemake -n` is enough.
rule plan:
    input:
        planned.unchanged("plan.tsv"),
