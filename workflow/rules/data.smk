rule data:
    input:
        SHARED.corpus_manifests,
        SHARED.verifications,
        SHARED.index_manifests,


rule train_tokenizer:
    input:
        lambda wildcards: SHARED.tokenizer_texts(wildcards.tokenizer),
        spec=planned("specs/tokenizers/{tokenizer}.json"),
    output:
        "<experiment>/tokenizers/{tokenizer}.json",
    log:
        "<experiment>/logs/tokenizers/{tokenizer}.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: 2
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa train-tokenizer --spec {input.spec} --out {output} 2>&1 | tee -i {log}"


rule list_sources:
    input:
        lambda wildcards: SHARED.corpus_inputs(wildcards.corpus),
        spec=planned("specs/corpora/{corpus}.json"),
    output:
        "<experiment>/data/{corpus}/sources.json",
    log:
        "<experiment>/logs/data/{corpus}/sources.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: 2
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa list-sources --spec {input.spec} --threads {threads} --out {output} 2>&1 | tee -i {log}"


# The merge deletes the shards' files and manifests.
rule tokenize:
    input:
        sources="<experiment>/data/{corpus}/sources.json",
        spec=planned("specs/corpora/{corpus}.json"),
    output:
        temp("<experiment>/data/{corpus}/shard-{shard}-of-{shards}.json"),
    log:
        "<experiment>/logs/data/{corpus}/shard-{shard}-of-{shards}.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: 2 if wildcards.shards == "1" else 1
    resources:
        mem_mb=lambda wildcards: SHARED.shard_mb(wildcards.corpus),
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa tokenize-shard --spec {input.spec} --sources {input.sources}"
        " --shard {wildcards.shard} --shards {wildcards.shards} --threads {threads} --out {output} 2>&1 | tee -i {log}"


rule merge_corpus:
    input:
        lambda wildcards: SHARED.shard_manifests(wildcards.corpus),
        sources="<experiment>/data/{corpus}/sources.json",
        spec=planned("specs/corpora/{corpus}.json"),
    output:
        "<experiment>/data/{corpus}.json",
    log:
        "<experiment>/logs/data/{corpus}/merge.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
        shards=lambda wildcards: SHARED.shards(wildcards.corpus),
    shell:
        "python {params.scripts:q}/megaboa merge-corpus --spec {input.spec} --sources {input.sources}"
        " --shards {params.shards} --out {output} 2>&1 | tee -i {log}"


rule verify_corpus:
    input:
        manifest="<experiment>/data/{corpus}.json",
        sources="<experiment>/data/{corpus}/sources.json",
        spec=planned("specs/corpora/{corpus}.json"),
    output:
        "<experiment>/data/{corpus}/verification.json",
    log:
        "<experiment>/logs/data/{corpus}/verification.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa verify-corpus --spec {input.spec} --sources {input.sources}"
        " --manifest {input.manifest} --out {output} 2>&1 | tee -i {log}"


# The samples and their order: made once for all runs that share it, before any of them holds a GPU.
rule index:
    input:
        lambda wildcards: SHARED.index_inputs(wildcards.index),
        spec=planned("specs/indexes/{index}.json"),
        preflight=lambda wildcards: INPUTS.preflight_of_index(wildcards.index),
    output:
        "<experiment>/data/indexes/{index}.json",
    log:
        "<experiment>/logs/data/indexes/{index}.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa build-index --spec {input.spec} --out {output} 2>&1 | tee -i {log}"
