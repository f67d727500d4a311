"""A spec written out loads as the same spec, and whatever a file holds is a spec or a `SpecError`."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

from attrs import evolve
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from ironfn.model.families import PRESETS
from ironfn.spec.check import check
from ironfn.spec.errors import SpecError
from ironfn.spec.load import dump_spec, load_spec
from ironfn.spec.records import RunSpec, SetSpec
from ironfn.spec.structure import fields_of

NAMES = sorted({str(path[-1]) for path in fields_of(RunSpec)})
WORDS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.sampled_from(
        ["no", "1e-5", "null", "~", "0x1f", "a: b", "- x", "# x", "'", '"', "\x85", "\u2028", "\ufeff", "\0"]
    ),
)
RATES = st.floats(1e-300, 1e300)
LETTERS = st.text("abcXYZ019._+-", min_size=1, max_size=9).filter(lambda name: name.strip("."))


@st.composite
def run_specs(draw: st.DrawFn) -> RunSpec:
    """Draw a valid spec whose free values are anything that their types allow."""
    spec = RunSpec(name=draw(LETTERS), out=draw(WORDS.filter(lambda word: word.strip() and "\0" not in word)))
    sources = st.lists(WORDS.filter(lambda word: word.strip() and "\0" not in word), min_size=1, max_size=3)
    sets = st.dictionaries(LETTERS, st.builds(SetSpec, sources=sources, weight=RATES, clean=st.booleans()), min_size=1)
    schedule = evolve(spec.optim.schedule, final=draw(st.floats(0, 1)), power=draw(RATES))
    optim = evolve(spec.optim, lr=draw(RATES), clip=draw(st.none() | RATES), schedule=schedule)
    return evolve(
        spec,
        model=evolve(spec.model, preset=draw(st.sampled_from(list(PRESETS))), dropout=draw(st.floats(0, 0.99))),
        data=evolve(spec.data, sets=draw(sets), temperature=draw(st.none() | RATES)),
        optim=evolve(optim, groups=draw(st.dictionaries(st.from_regex(r"[a-z/.*$^ :#]{1,9}\Z"), st.just("adamw")))),
        train=evolve(spec.train, seed=draw(st.integers(0, 2**63 - 1)), compile=draw(st.booleans())),
        report=evolve(spec.report, prompts=draw(st.lists(WORDS, max_size=4)), peak_flops=draw(st.none() | RATES)),
    )


def load(text: str) -> RunSpec:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_bytes(text.encode())
        return load_spec([file], [], PRESETS)


@settings(max_examples=50)
@given(run_specs())
def test_a_spec_written_out_loads_as_the_same_spec(spec: RunSpec) -> None:
    assume(not check(spec, None))  # such as a group that is no regular expression
    assert load(dump_spec(spec)) == spec


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), WORDS, st.sampled_from([1, 2, 8, 0.5, "llama"])
)
TREES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | WORDS, inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(NAMES), TREES, max_size=6))
def test_whatever_a_file_holds_is_a_spec_or_a_spec_error(tree: dict[str, Any]) -> None:
    text = io.StringIO()
    YAML(typ="safe", pure=True).dump(tree, text)
    try:
        spec = load(text.getvalue())
    except SpecError as error:
        assert all(fault.place.source.endswith("run.yaml") and fault.what for fault in error.faults)  # noqa: PT017
    else:
        assert load(dump_spec(spec)) == spec


@settings(max_examples=50)
@given(st.text(st.characters(codec="utf-8"), max_size=200))
def test_any_text_and_any_override_is_a_spec_or_a_spec_error(text: str) -> None:
    for attempt in (lambda: load(text), lambda: load_spec([], [text, f"optim.lr={text}", f"{text}=1"], PRESETS)):
        try:
            attempt()
        except SpecError as error:
            assert error.faults  # noqa: PT017
