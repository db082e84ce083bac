"""Training data, tokenizer, baselines and evaluation of the small model; run from the checkout."""
