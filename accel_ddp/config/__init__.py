"""The options of a run: their declaration, groups, parsing and checks. Nothing here imports torch.

`train_config` has the options of every run, `options` what is stored with an option, `parsing` reads a command line and a config
file. The package may import `errors` and `nodes`.
"""
