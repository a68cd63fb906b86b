"""A trained model as a folder that transformers loads, with a model card. The package may import `tasks` and the layers below it."""
