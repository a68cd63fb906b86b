"""The GPU memory that a run needs, computed from its options before any weight is loaded.

`fake_model` builds the model without values and counts its states, `step_trace` records a micro-batch, and `estimate` computes the
peak and what to change. `at_start` checks a run, and `estimate_command` is `accel-ddp estimate`. The package may import `tasks`,
`speed` and everything below them.
"""
