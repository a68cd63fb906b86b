"""Rows and pretrained models from the Hugging Face Hub, from files and from installed packages.

`data` loads, samples and checks rows. `table_files` reads files and explains why one cannot be read. `tokenization` turns rows
into tokens once and caches them, and `shard_map` lets all cores do it. `models` loads models, `sharded_loading` loads only the
rows of a rank, `model_kinds` checks whether a model suits a task, and `adapters` adds LoRA adapters. `builtin` has the datasets
and models that need no network, and finds all others; `builtin_data` makes the datasets. `places` has the cache, installed
packages and the access to the Hub. The package imports `training`, `saving`, `ranks` and the packages below them.
"""
