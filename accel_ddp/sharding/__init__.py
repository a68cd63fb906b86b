"""Models that are spread over ranks (FSDP2): how a model is sharded, and what a rank holds of a tensor.

`environment.sharding` reads from the accelerate config whether a model is sharded. The package imports `ranks` and the lowest layer.
"""
