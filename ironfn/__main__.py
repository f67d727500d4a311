"""Reach the command line with ``python -m ironfn``, from an installed package and from a source tree alike."""

from __future__ import annotations

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def run() -> None:
    """Call the command line that lies beside this package: ``ironfn_drivers`` when installed, ``drivers`` in a tree.

    The tree's own directory is taken by its path, so that another installed ironfn cannot answer in its place.
    """
    beside = Path(__file__).resolve().parents[1]
    tree = beside / "drivers" / "__init__.py"
    if not (beside / "ironfn_drivers").is_dir() and tree.is_file():
        spec = spec_from_file_location("ironfn_drivers", tree, submodule_search_locations=[str(tree.parent)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules["ironfn_drivers"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["ironfn_drivers"])
    importlib.import_module("ironfn_drivers.main").main(prog_name="ironfn")


if __name__ == "__main__":
    run()
