"""Text to tokens: sources of text, tokenizers, and the indexed corpora that Megatron reads."""
