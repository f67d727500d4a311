"""Programs that mean harm, out of a file in which each has a title.

Each defines f(path, pid): what it returns passes only if it is the secret of the parent, which is in a file of the host
at that path and in the environment and the memory of the process of that pid, and nowhere else. A program that returns
it has escaped. Never run one of these outside of the sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_TEXT = re.sub(r"^#####.*$", "", Path(__file__).with_name("hostile_programs.txt").read_text(), flags=re.MULTILINE)
PROGRAMS: Mapping[str, str] = MappingProxyType(
    dict(re.findall(r"^=== ([^\n]+)\n(.*?)(?=^=== |\Z)", _TEXT, re.MULTILINE | re.DOTALL))
)
