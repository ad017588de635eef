rule data:
    input:
        expand(f"{RESULTS}/data/{{corpus}}.json", corpus=SHARED.corpora),


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
