"""Write a spec as YAML that loads as the same spec."""

from __future__ import annotations

import io

from cattrs import Converter
from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from ironfn.spec.records import RunSpec


class _Plain(SafeRepresenter):
    """Write every value out where it stands, and text with line ends in double quotes.

    In single quotes the emitter writes U+0085, U+2028 and U+2029 as they are, and the parser folds them to a space.
    """

    def ignore_aliases(self, data: object) -> bool:
        return True

    def text(self, data: str) -> ScalarNode:
        quotes = '"' if any(end in data for end in "\n\r\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=quotes)


_Plain.add_representer(str, _Plain.text)


def dump_spec(spec: RunSpec) -> str:
    """Write a spec as the YAML text that `load_spec` reads back to the same record."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Plain
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # pyright: ignore[reportAttributeAccessIssue]
    yaml.allow_unicode = True
    yaml.width = 10_000
    text = io.StringIO()
    yaml.dump(Converter().unstructure(spec), text)
    return text.getvalue()
