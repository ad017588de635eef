# The table and the files of the runs are there when the Snakefile has been read: `snakemake -n` is enough to see them.
rule plan:
    input:
        "<experiment>/plan.tsv",
