"""Code for single recipes: labels, tags, chats, contrastive losses, masking, images, and the metrics and tables of each task.

A module of this package serves one or two recipes. The package imports `sources`, `training` and the packages below them.
"""
