"""ironfn: train language models with pure functions that give the same result on every mesh."""

__version__ = "0.1.0"
