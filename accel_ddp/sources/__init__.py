"""Rows and pretrained models from the Hugging Face Hub, from files and from installed packages.

`rows` loads and checks tables, `tokenisation` tokenises them once and caches the result on disk, `models` loads models and adds
adapters, `builtin` contains the data and models that need no network, and `hub` checks whether the Hub can be reached. The package
imports `saving`, `ranks` and the lowest layer.
"""
