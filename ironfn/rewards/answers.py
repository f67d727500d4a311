"""Find the final answer of a text about mathematics, and compare what needs no algebra to be compared."""

from __future__ import annotations

import re
from fractions import Fraction

_BOX = re.compile(r"\\f?box(?:ed)?(?=[\s{])\s*")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][+-]?\d{1,3})?")
_MENTIONED = re.compile(r"(?:(?<![\w.)])-)?(?<![\d.])\d+(?:,\d{3})*(?:\.\d+)?")
_FRACTION = re.compile(r"([+-]?)\\frac(?:\{([^{}]+)\}|(\d))(?:\{([^{}]+)\}|(\d))")
_MIXED = re.compile(r"([+-]?)(\d+) (\d+)/(\d+)")
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|boldsymbol)\s*\{([^{}]*)\}")
_GAPS = re.compile(r"(?:\\[;: ]|~|\\q?quad(?![a-zA-Z])|\s)+")
_NOTHING = re.compile(r"\\[!,]|\\(?:left|right)(?![a-zA-Z])")


def boxed(text: str) -> str | None:
    r"""Return what the last \boxed{} or \fbox{} holds. None where there is no box, or the last is empty or open.

    >>> boxed(r"first \boxed{1}, then \boxed{\frac{1}{2}}"), boxed(r"\boxed{1} and \boxed{2"), boxed("1")
    ('\\frac{1}{2}', None, None)
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    last = boxes[-1]
    if text[last.end() : last.end() + 1] != "{":  # as MATH writes it now and then: \boxed 5
        short = re.match(r"[^\s${}\\]+", text[last.end() :])
        return short.group() if short else None
    depth = 0
    for at in range(last.end(), len(text)):
        if text[at] in "{}" and text[at - 1] != "\\":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return text[last.end() + 1 : at].strip() or None
    return None


def hashed(text: str) -> str | None:
    """Return what stands behind the last ``####`` of a text, as in GSM8K. None where nothing does.

    >>> hashed("2 + 2 = 4\\n#### 4"), hashed("4")
    ('4', None)
    """
    _, found, tail = text.rpartition("####")
    return (tail.strip().split("\n")[0].strip() or None) if found else None


def last_number(text: str) -> str | None:
    """Return the last number that a text mentions, for models that end with a sentence. None where there is none.

    >>> last_number("3 boxes of 4 are 12 apples."), last_number("she has $1,250.50 left"), last_number("none")
    ('12', '1,250.50', None)
    """
    found = _MENTIONED.findall(text)
    return found[-1] if found else None


def plain(answer: str) -> str:
    r"""Return an answer without what only changes its looks: bold, $, \text around all of it, \left.

    A percent sign and a sign of degrees are looks, so 28\% is 28, on either side, and is not 0.28.

    >>> [plain(each) for each in (r"**73**", r"$\text{E}$", r"28\%", r"\dfrac12", r"90^\circ", "5.")]
    ['73', 'E', '28', '\\frac12', '90', '5']
    """
    before = None
    while before != answer:
        before = answer
        answer = answer.strip()
        for mark in ("**", "__", "$$", "$"):
            if len(answer) > 2 * len(mark) and answer.startswith(mark) and answer.endswith(mark):
                answer = answer[len(mark) : -len(mark)]
        for begin, end in ((r"\(", r"\)"), (r"\[", r"\]")):
            if answer.startswith(begin) and answer.endswith(end):
                answer = answer[2:-2]
        if wrapped := _WRAPPED.fullmatch(answer):
            answer = wrapped.group(1)
        answer = re.sub(r"\\[dt]frac", r"\\frac", _NOTHING.sub("", _GAPS.sub(" ", answer)))
        answer = re.sub(r"(?:\\?%|\^\{?\\circ\}?|°)$", "", answer).removeprefix("\\$").removeprefix("$")
        if answer.endswith(".") and not answer.endswith(".."):
            answer = answer[:-1]
    return answer


def number(answer: str) -> Fraction | None:
    r"""Return a plain answer as an exact number, where it is written as one.

    >>> [str(number(each)) for each in ("1,000", "0.5", r"\frac12", "-3 / 4", "1e3", "x", "1,00", "1 1/2")]
    ['1000', '1/2', '1/2', '-3/4', '1000', 'None', 'None', '3/2']
    """
    answer = re.sub(r"\s*/\s*", "/", re.sub(r"^([+-]) ", r"\1", answer.strip()))
    if len(answer) > 100:
        return None
    if found := _FRACTION.fullmatch(answer):
        return _ratio(number(found[2] or found[3]), number(found[4] or found[5]), -1 if found[1] == "-" else 1)
    if mixed := _MIXED.fullmatch(answer):
        part = _ratio(Fraction(mixed[3]), Fraction(mixed[4]), 1)
        return None if part is None else (int(mixed[2]) + part) * (-1 if mixed[1] == "-" else 1)
    if answer.count("/") == 1:
        above, below = answer.split("/")
        return _ratio(number(above), number(below), 1)
    if not re.search(r"\d", answer.split("e")[0].split("E")[0]) or not _NUMBER.fullmatch(answer):
        return None
    return Fraction(answer.replace(",", ""))


def _ratio(above: Fraction | None, below: Fraction | None, sign: int) -> Fraction | None:
    return None if above is None or not below else sign * above / below


def surely(first: str, second: str) -> bool | None:
    """Tell whether two plain answers are equal where no algebra is needed for it. None where it is.

    Numbers are compared exactly: a rounded one is another.
    """
    if first == second:
        return True
    numbers = number(first), number(second)
    return None if None in numbers else numbers[0] == numbers[1]
