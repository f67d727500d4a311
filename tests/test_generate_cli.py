"""`ironfn generate` and `ironfn chat`: prompts in, texts out, in their order; a conversation that goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from drivers.main import main
from drivers.telling import Piece, Teller
from drivers.trained import Trained
from drivers.writer import Writer, engine_of, for_writing
from ironfn.generate.engine import End, Request, Token
from ironfn.generate.sampling import Sampling
from ironfn.generate.text import Words, pieces

from .tiny_model import END, TEXT, tiny_model

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", context=128)


@pytest.fixture(scope="module")
def trained(model: Path) -> Trained:
    return for_writing(model, None, False)


def run(*arguments: Any, said: str = "", code: int = 0) -> Result:
    done = CliRunner().invoke(main, [str(each) for each in arguments], input=said)
    assert done.exit_code == code, done.output
    return done


def lines(done: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def written(trained: Trained, ids: list[int], limit: int, number: int = 0, **sampling: Any) -> str:
    request = Request(
        key=0, prompt=tuple(ids), limit=limit, stop=trained.stop, sampling=Sampling(**sampling), stream=(number,)
    )
    told = Writer(engine_of(trained)).write([(request, Words(trained.tokenizer))])
    return "".join(piece.text for piece in told)


def test_one_prompt_is_followed_by_its_text(model: Path, trained: Trained) -> None:
    done = run("generate", model, "-p", "the fox", "-t", 0, "--tokens", 12)
    assert done.stdout == f"the fox{written(trained, trained.encode('the fox'), 12, temperature=0)}\n\n"
    assert run("generate", model, "-p", "-", "-t", 0, "--tokens", 12, said="the fox").stdout == done.stdout
    assert len(run("generate", model, "--tokens", 3).stdout.strip()) > 0, "without a prompt it begins a text"


@pytest.mark.parametrize("where", ["arguments", "lines", "stdin", "jsonl"])
def test_prompts_come_from_anywhere_and_keep_their_order(
    where: str, model: Path, trained: Trained, tmp_path: Path
) -> None:
    prompts = [f"{'lazy ' * (40 - n)}{n}" if n % 5 == 0 else f"dog {n}" for n in range(40)]
    file, said, options = tmp_path / ("p.jsonl" if where == "jsonl" else "p.txt"), "", list[str]()
    if where == "arguments":
        options = [part for prompt in prompts for part in ("-p", prompt)]
    elif where == "stdin":
        options, said = ["-f", "-"], "\n".join(prompts)
    else:
        row = (lambda prompt: json.dumps({"prompt": prompt, "id": 1})) if where == "jsonl" else str
        file.write_text("".join(row(prompt) + "\n" for prompt in prompts))
        options = ["--file", str(file)]
    done = lines(run("generate", model, *options, "--jsonl", "--tokens", 9, "--seed", 4, "-k", 0, said=said))
    assert [row["prompt"] for row in done] == prompts
    for number in (0, 7, 39):
        assert set(done[number]) == {"prompt", "completion", "finish_reason", "tokens"}
        right = written(trained, trained.encode(prompts[number]), 9, number, temperature=0.8, seed=4)
        assert done[number]["completion"] == right
        assert trained.tokenizer.decode(done[number]["tokens"]) == right


def test_completions_stops_and_log_probabilities(model: Path, trained: Trained) -> None:
    asked = ("generate", model, "-p", "fox", "-p", "dog", "-n", 3, "--tokens", 20, "--jsonl")
    rows = lines(run(*asked, "--log-probs"))
    assert [(row["prompt"], row["index"]) for row in rows] == [(p, n) for p in ("fox", "dog") for n in range(3)]
    assert len({row["completion"] for row in rows}) == 6
    assert all(len(row["log_probs"]) == len(row["tokens"]) == 20 and max(row["log_probs"]) < 0 for row in rows)
    stop = rows[1]["completion"][5:7]
    cut = lines(run(*asked, "--stop", stop))
    assert cut[1]["completion"] == rows[1]["completion"].partition(stop)[0]
    assert cut[1]["finish_reason"] == "stop"
    assert all(stop not in row["completion"] for row in cut)
    plain = run(*asked[:-1]).stdout
    assert plain == "".join(f"{row['prompt']}{row['completion']}\n\n" for row in rows)


def test_prompts_as_messages(model: Path, trained: Trained) -> None:
    chat = trained.chat()
    assert chat is not None
    ids = chat.encode([{"role": "user", "content": "hi"}])
    chat.renderer.close()
    (row,) = lines(run("generate", model, "-p", "hi", "--chat", "--jsonl", "-t", 0, "--tokens", 8))
    assert row["completion"] == written(trained, ids, 8, temperature=0)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["-t", "nan"], "temperature nan"),
        (["--top-p", "2"], "top_p 2.0 must be"),
        (["-p", "fox " * 300], "does not fit the model's context of 128"),
        (["--stop", ""], "stop string is empty"),
        (["-f", "rows.jsonl"], r"rows.jsonl:2: has no text in the field prompt"),
        (["-f", "bad.jsonl"], r"bad.jsonl:1: not JSON"),
        (["-p", "x", "--template", "x"], "No such option"),
    ],
    ids=["temperature", "top-p", "long", "stop", "field", "json", "option"],
)
def test_what_cannot_be_done_is_told(
    options: list[str], what: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (tmp_path / "bad.jsonl").write_text("{\n")
    done = CliRunner().invoke(main, ["generate", str(model), *options])
    assert done.exit_code in (1, 2)
    assert what in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    bare = tiny_model(tmp_path / "bare", template=False)
    for command in (("chat", bare), ("generate", bare, "--chat", "-p", "x")):
        assert "has no chat template" in run(*command, code=1).stderr
    done = run("chat", bare, "--template", "chatml", "-t", 0, "--tokens", 5, said="fox\n")
    assert len(done.stdout.strip()) > 0


def test_a_conversation_goes_on_until_it_is_reset(model: Path, trained: Trained) -> None:
    said = "fox\n\nlazy\n/reset\nfox\n/system brown\nfox\n/what\n/help\n" + "dog " * 200 + "\nfox\n/quit\nnever"
    done = run("chat", model, "-t", 0, "--tokens", 6, "--system", "quick", said=said)
    chat = trained.chat()
    assert chat is not None

    def answered(system: str, *turns: str) -> str:
        roles = ["user", "assistant"] * len(turns)
        told = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
        return written(trained, chat.encode([{"role": "system", "content": system}, *told]), 6, temperature=0)

    first = answered("quick", "fox")
    other = answered("brown", "fox")
    right = [first, answered("quick", "fox", first, "lazy"), first, other, answered("brown", "fox", other, "fox")]
    assert done.stdout == "".join(f"{text}\n" for text in right)
    assert done.stderr.count("/reset          forget") == 2
    assert "/what is no command" in done.stderr
    assert "does not fit the model's context of 128; /reset forgets what was said" in done.stderr
    chat.renderer.close()


def test_ctrl_c_ends_an_answer_and_not_the_talk(tmp_path: Path) -> None:
    long = tiny_model(tmp_path / "long", context=8192)
    command = [sys.executable, "-m", "ironfn", "chat", str(long), "-t", "0", "--tokens", "8000"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  (whoever runs this may ignore it)
    process = subprocess.Popen(command, env=env, cwd=tmp_path, preexec_fn=heard, **pipes)  # pyright: ignore
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"fox\n")
        process.stdin.flush()
        begun = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(b"/reset\n/quit\n", timeout=60)
        assert process.returncode == 0, errors
        assert b"Traceback" not in errors
        assert (begun + rest).count(b"\n") >= 1
        assert len(begun + rest) < 8000
    finally:
        process.kill()
        process.wait()


STOPS = st.lists(st.text(st.sampled_from("theqo 漢🙂"), min_size=1, max_size=3))


@given(text=st.text(st.sampled_from(TEXT), max_size=60), stops=STOPS, ended=st.booleans())
def test_a_text_is_told_as_it_would_be_at_once(trained: Trained, text: str, stops: list[str], ended: bool) -> None:
    words = trained
    ids = words.tokenizer.encode(text, add_special_tokens=False).ids
    how = Words(words.tokenizer, tuple(stops))
    request = Request(key="k", prompt=(1,), limit=99, n=2, stop=frozenset([END]))
    teller = Teller()
    teller.expect(request, how)
    tokens = [Token("k", 1, i, -1.0) for i in ids] + ([Token("k", 1, END, -1.0)] if ended else [])
    told: list[Piece] = []
    enough: list[Any] = []
    for event in (*tokens, End("k", 1, "stop" if ended else "length")):
        found, done = teller.hear([event])
        told += found
        enough += done
    whole = "".join(pieces(how, ids))
    assert "".join(piece.text for piece in told) == whole
    assert [piece.finish for piece in told if piece.finish] == ["stop" if ended or whole != text else "length"]
    assert told[-1].finish is not None
    assert enough in ([], [("k", 1)])
    assert bool(enough) or told[-1].used == len(tokens)
    kept = [token.id for piece in told for token in piece.tokens]
    assert kept == ids[: len(kept)]
    if whole == text:
        assert kept == ids
        assert told[-1].used == len(tokens)
    assert teller.hear([Token("k", 1, 5, -1.0)]) == ([], []), "what is complete is forgotten"


def test_the_code_of_the_page_runs(model: Path, trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/generation.md").read_text("utf-8"), re.M | re.S)
    exec(blocks[1], {"RUN": model, "params": trained.params, "arch": trained.arch})
    assert len(eval(capsys.readouterr().out)) == 3
