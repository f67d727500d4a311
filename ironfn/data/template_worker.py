"""Render a chat template in a process of its own, which its limits end: the other side of `ironfn.data.template`.

A template is somebody else's program. Jinja's sandbox keeps it from the machine; nothing inside Python keeps a loop
from going on or a string from doubling, but the kernel does: a clock of the processor's time and a bound on memory.

Run as a script that imports nothing of ironfn. Standard input: one line of JSON with the template and its limits, then
a line for each rendering; standard output: a line for each. Functions and filters are those that
`transformers.utils.chat_template_utils` gives to templates.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """Let ``{% generation %} … {% endgeneration %}`` put the two strings of ``_marks`` around what it writes."""

    tags = frozenset({"generation"})  # pyright: ignore[reportAssignmentType]: jinja looks names up in it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _between(self, context: Context, caller: Macro) -> str:
        begin, end = context["_marks"]
        return f"{begin}{caller()}{end}"


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Namespace(jinja2.utils.Namespace):
    """Be jinja's namespace but for names that begin with an underscore, which lead into Python."""

    def __init__(*args: Any, **fields: Any) -> None:
        self, *rest = args
        jinja2.utils.Namespace.__init__(self, *rest, **fields)
        for name in dict(*rest, **fields):
            _Namespace._check(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.TemplateError(f"a namespace holds no names that begin with an underscore, such as {name!r}")


def compiled(text: str) -> jinja2.Template:
    """Return a template, ready to render."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    own: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now, "namespace": _Namespace}
    environment.globals |= own
    return environment.from_string(text)


def rendered(template: jinja2.Template, variables: dict[str, Any], characters: int) -> str:
    """Return what a template writes. ValueError where that is more than so many characters."""
    parts: list[str] = []
    left = characters
    for part in template.generate(variables):
        parts.append(part)
        left -= len(part)
        if left < 0:
            raise ValueError(f"it writes more than {characters:,} characters")
    return "".join(parts)


def _answer(work: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"text": work()}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except Exception as error:  # whatever a template makes Python raise is a fault of the template
        return {"error": f"{error or type(error).__name__}"}


def main() -> None:
    """Answer until standard input ends, or a limit ends the process."""
    first = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (first["memory"], first["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this
    template: jinja2.Template | None = None
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, first["seconds"])

        def work(asked: dict[str, Any] = asked) -> str:
            nonlocal template
            if template is None:
                template = compiled(first["template"])
            return rendered(template, asked["variables"] | {"_marks": asked["marks"]}, first["characters"])

        said = json.dumps(_answer(work))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(said, flush=True)


if __name__ == "__main__":
    main()
