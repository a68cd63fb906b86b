"""Hooks observe a run: progress, log, trackers, early stopping, profiles. They never change what is learned, but may end the run.

`hook` is the interface, and `hooks` collects what recipes use. `recorder` records the steps that `--profile` selects; `traces`,
`trace_analysis`, `profile_advice` and `profile_summary` read the traces. The package may import `training` and the layers below it.
"""
