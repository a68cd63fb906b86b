"""Hooks observe a run: the progress in the terminal, the log, trackers, early stopping.

They never change what is learned, but they may end the run. `hook` is the interface, and `hooks` collects what recipes use. The
package imports `training` and what is below it.
"""
