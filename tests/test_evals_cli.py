"""`ironfn eval`, from files to a table and to rows; what is wrong with a file is told with its line."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from drivers.main import main

SPEC = """
name: small
out: {folder}/runs
model: {{width: 32, layers: 1, heads: 2, ffn: 48, context: 32}}
data:
  dir: {folder}/data
  sets: {{prose: {{sources: ["{folder}/prose.txt"], split_on: "\\n\\n"}}}}
  tokenizer: {{vocab_size: 300}}
  length: 32
train: {{steps: 2, batch: 2, threads: 1}}
report: {{prompts: []}}
"""
QUESTIONS = [{"query": f"the {n}", "choices": ["fox jumps", "dog"], "gold": n % 2} for n in range(6)]
PARTIAL = [{"context_options": ["the fox", "the dog"], "continuation": "jumps", "gold": 0}]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small model for two steps."""
    folder = tmp_path_factory.mktemp("evals")
    (folder / "prose.txt").write_text("\n\n".join(f"{n} the quick brown fox jumps over a dog" for n in range(40)))
    (folder / "small.yaml").write_text(SPEC.format(folder=folder))
    for word in ("prepare", "pretrain"):
        result = invoke(word, folder / "small.yaml")
        assert result.exit_code == 0, result.output
    return folder / "runs" / "small"


def test_a_run_is_measured_on_questions_and_on_texts(run: Path, tmp_path: Path) -> None:
    files = [write(tmp_path / "fox.jsonl", QUESTIONS), write(tmp_path / "part.jsonl", PARTIAL), tmp_path / "café.txt"]
    files[-1].write_text("\N{ZERO WIDTH NO-BREAK SPACE}" + "the café and the fox\n" * 9, encoding="utf-8")
    files.append(write(tmp_path / "texts.jsonl", [{"text": "the fox"}, {"text": "a dog"}]))
    tasks = [word for file in files for word in ("--tasks", file)]
    out, items = tmp_path / "out.jsonl", tmp_path / "items.jsonl"
    result = invoke("eval", run, *tasks, "--context", 4, "--out", out, "--items", items)
    assert result.exit_code == 0, result.output
    fox, part, cafe, texts = [json.loads(line) for line in out.read_text().splitlines()]
    rows = [json.loads(line) for line in items.read_text().splitlines()]
    assert [len(rows), fox["items"], part["items"], cafe["items"], texts["items"]] == [10, 6, 1, 1, 2]
    assert fox["acc"] == sum(row["by_sum"] == row["gold"] for row in rows[:6]) / 6
    assert fox["acc_norm"] == sum(row["by_character"] == row["gold"] for row in rows[:6]) / 6
    assert "acc_norm" not in part
    assert part["acc_stderr"] is None, "one item has no error, and JSON no NaN"
    assert cafe["bytes"] == 9 * len("the café and the fox\n".encode())
    assert cafe["token_perplexity"] == pytest.approx(math.exp(cafe["nats"] / cafe["tokens"]))
    assert (cafe["window"], cafe["context"]) == (32, 4)
    assert texts["nats"] == pytest.approx(rows[-2]["nats"] + rows[-1]["nats"])
    for word in ("fox", "acc_norm", f"{fox['acc']:.4f}", "bits_per_byte", f"{cafe['token_perplexity']:.4f}"):
        assert word in result.output
    assert rows[1]["place"] == f"{files[0]}:2"


def test_a_limit_takes_the_first_and_a_seed_draws(run: Path, tmp_path: Path) -> None:
    file, items = write(tmp_path / "fox.jsonl", QUESTIONS), tmp_path / "items.jsonl"

    def lines(*options: object) -> list[int]:
        assert invoke("eval", run, "-t", file, "--items", items, *options).exit_code == 0
        return [int(json.loads(line)["place"].rpartition(":")[2]) for line in items.read_text().splitlines()]

    assert lines("--limit", 3) == [1, 2, 3]
    assert lines("--limit", 9) == [1, 2, 3, 4, 5, 6]
    drawn = lines("--limit", 3, "--seed", 1)
    assert drawn == lines("--limit", 3, "--seed", 1) == sorted(set(drawn))
    assert {tuple(lines("--limit", 3, "--seed", seed)) for seed in range(4)} != {tuple(drawn)}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 0}\n\n{"query": \n', ":3: not JSON"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 0}\n{"query": "a", "choices": "b", "gold": 0}', ":2: choices"),
        ('{"answer": 1}\n', ":1: the fields 'answer' are of no known schema (multiple choice: query, choices, gold;"),
        ('{"query": "a", "choices": ["b", "c"], "gold": NaN}\n', ":1: gold is nan"),
        ('{"text": "a"}\n{"body": "b"}\n', ":2: no field 'text'; the fields are 'body'"),
        ("[1]\n", ":1: a JSON object belongs here, not list"),
    ],
    ids=["empty", "blank", "no json", "gold", "schema", "not a number", "no text", "no object"],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_told_with_its_line(run: Path, tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "faulty.jsonl"
    file.write_text(text)
    result = invoke("eval", run, "-t", file)
    assert (result.exit_code, what in result.output, str(file) in result.output) == (1, True, True), result.output
    assert "step-" not in result.output  # it is told before the model is read


@pytest.mark.parametrize("content", [b"junk", gzip.compress(b'{"text": "a"}\n' * 999)[:-9]], ids=["none", "cut off"])
def test_a_compressed_file_that_is_damaged_is_told(run: Path, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "faulty.jsonl.gz"
    file.write_bytes(content)
    result = invoke("eval", run, "-t", file)
    assert (result.exit_code, f"{file}: cannot be read to its end" in result.output) == (1, True), result.output


def test_a_line_without_end_is_refused_in_little_memory(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "bomb.jsonl.gz"
    with gzip.open(file, "wb", compresslevel=1) as packed:
        for _ in range(100):
            packed.write(b"x" * (1 << 20))
    result = invoke("eval", run, "-t", file)
    assert (result.exit_code, "bomb.jsonl.gz:1: more than 67,108,864 bytes" in result.output) == (1, True)


def test_nothing_is_written_over_and_no_place_found_missing_after_the_work(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the fox")
    both = tmp_path / "both.jsonl"
    for words, why in (
        (("--out", file), "is read, or written already"),
        (("--out", both, "--items", both), "is read, or written already"),
        (("--items", tmp_path / "no" / "items.jsonl"), "there is no directory"),
    ):
        result = invoke("eval", run, "-t", file, *words)
        assert (result.exit_code, why in result.output, "step-" in result.output) == (1, True, False), result.output
    assert file.read_text() == "the fox"


def test_texts_that_are_no_text_and_tokens_that_are_none_are_refused(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "bytes.txt"
    file.write_bytes(b"good\nb\xffd\n")
    assert "bytes.txt:2: invalid UTF-8" in invoke("eval", run, "-t", file).output
    file.write_bytes(b"good")
    assert "--begin '<none>' is no token" in invoke("eval", run, "-t", file, "--begin", "<none>").output
    assert "window of 33 tokens is longer than the model's context of 32" in invoke(
        "eval", run, "-t", file, "--window", 33
    ).output  # fmt: skip
    assert invoke("eval", run, "-t", file, "--begin", "<|fim_prefix|>").exit_code == 0


def test_a_model_from_elsewhere_brings_the_token_that_stands_before_a_text(run: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "text.txt", tmp_path / "out.jsonl"
    file.write_text("the fox")

    def nats(*options: object) -> float:
        assert invoke("eval", run, "-t", file, "--out", out, *options).exit_code == 0
        return json.loads(out.read_text())["nats"]

    own, other = nats(), nats("--begin", "<|fim_prefix|>")
    assert own == nats("--begin", "<|endoftext|>") != other
    (run / "hf").mkdir()
    for told in ("<|fim_prefix|>", {"content": "<|fim_prefix|>"}):
        (run / "hf" / "tokenizer_config.json").write_text(json.dumps({"bos_token": told}))
        assert nats() == other
    (run / "hf" / "tokenizer_config.json").write_text('{"bos_token": null}')
    assert nats() == own
