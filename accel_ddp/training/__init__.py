"""The exact core: one optimizer update, the order of the data, the optimizer, losses and evaluation.

How items are spread over micro-batches and ranks does not change what these modules compute. The package imports `saving`, `ranks`
and the packages below them, and nothing from `speed`.
"""
