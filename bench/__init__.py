"""Measure ironfn against its peers, side by side, in one run."""
