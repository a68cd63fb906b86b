"""How much GPU memory a run needs, computed from its options before any weight is loaded.

It may import `tasks` and everything that `tasks` may import, and `speed`. `recipe` and `accel-ddp estimate` use it.
"""
