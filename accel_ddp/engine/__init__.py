"""A step and the loop over steps: what a run computes. Other packages add data, models, speed and observers.

It may import compat, config, phases, ranks, records, saving, seeds and text.
"""
