"""Rows and pretrained models from the Hugging Face Hub, from files and from installed packages.

`data` loads and checks rows, `files` reads tables from files, `tokenisation` tokenises rows, `cache` writes a folder once per node,
`models` loads models and adds adapters, and `model_kinds` checks whether a model suits a task. `builtin` contains the datasets and
models that need no network; its parts are `builtin_data`, `builtin_models`, `standard_library` and `packages`. `hub` checks
whether the Hub can be reached. The package imports `training`, `saving`, `ranks` and the lowest layer.
"""
