"""Outrider runs language models with small models riding ahead of the large one. See README.md."""

__version__ = "0.1.0"
