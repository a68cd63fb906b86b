"""Hooks observe a run: progress, log, trackers, early stopping, profiles. They never change what is learned, but may end the run.

`hook` is the interface, and `hooks` collects what recipes use. `progress` and `display` are the panel in a terminal, `trackers` and
`tracker_kinds` pass numbers to wandb and others. `recorder` records the steps that `--profile` selects, `traces` analyzes them, and
`profile_summary` states what to change. The package may import `memory` and the layers below it.
"""
