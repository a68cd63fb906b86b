"""Rows and pretrained models from the Hugging Face Hub, from files and from installed packages.

`data` loads, samples and checks rows, `files` reads files and explains why one cannot be read, `tokenization` tokenizes rows, and
`cache` writes a folder once per node. `models` loads models, `pretrained` finds their files, `model_kinds` checks whether they suit
a task, and `adapters` adds LoRA adapters. `builtin` contains the datasets and models that need no network; its parts are
`builtin_data`, `builtin_models`, `standard_library` and `packages`. `hub` checks whether the Hub can be reached. The package
imports `training`, `saving`, `ranks` and the lowest layer.
"""
