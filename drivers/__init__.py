"""Drive ironfn from the command line: one file for each mode, `main.py` the group that holds them.

In an installed package this directory is called ``ironfn_drivers``.
"""
