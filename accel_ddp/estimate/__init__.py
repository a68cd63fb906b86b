"""The command `accel-ddp estimate`. It may import `memory`, `recipe_files` and the lowest layer."""
