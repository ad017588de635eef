rule data:
    input:
        expand(f"{RESULTS}/data/{{corpus}}.json", corpus=SHARED.corpora),
        expand(f"{RESULTS}/data/indexes/{{index}}.json", index=SHARED.indexes),


rule train_tokenizer:
    input:
        lambda wildcards: SHARED.tokenizer_texts(wildcards.tokenizer),
        spec=f"{RESULTS}/specs/tokenizers/{{tokenizer}}.json",
    output:
        f"{RESULTS}/tokenizers/{{tokenizer}}.json",
    log:
        f"{RESULTS}/logs/tokenizers/{{tokenizer}}.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: 2
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/train_tokenizer.py --spec {input.spec} --out {output} 2>&1 | tee {log}"


rule tokenize:
    input:
        lambda wildcards: SHARED.corpus_inputs(wildcards.corpus),
        spec=f"{RESULTS}/specs/corpora/{{corpus}}.json",
    output:
        f"{RESULTS}/data/{{corpus}}.json",
    log:
        f"{RESULTS}/logs/data/{{corpus}}.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: 2
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/tokenize_corpus.py --spec {input.spec} --out {output} 2>&1 | tee {log}"


# Which samples are drawn, and in which order: made once for all runs that share it, before any of them holds a GPU.
rule index:
    input:
        lambda wildcards: SHARED.index_inputs(wildcards.index),
        spec=f"{RESULTS}/specs/indexes/{{index}}.json",
    output:
        f"{RESULTS}/data/indexes/{{index}}.json",
    log:
        f"{RESULTS}/logs/data/indexes/{{index}}.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/build_index.py --spec {input.spec} --out {output} 2>&1 | tee {log}"
