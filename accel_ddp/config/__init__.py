"""The options of a run: their declaration, groups, parsing and checks. Nothing here imports torch.

`run_options` and `optimizer_options` declare the options of every run in groups, `train_config` combines and checks them. `options`
has what is stored with an option, `option_values` reads the values of --best_metric and --profile, `choices` stores what was chosen
for `auto`, and `parsing` reads a command line and a config file. The package may import `errors`, `text`, `words` and `nodes`.
"""
