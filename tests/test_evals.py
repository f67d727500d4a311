"""Questions and texts are scored as `lm-eval` scores them with `transformers`: token for token, number for number."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ironfn import tree
from ironfn.data.readers import Row
from ironfn.data.tokenizer import train
from ironfn.evals.accuracy import Accuracy, Answer, answer, share
from ironfn.evals.items import Question, question
from ironfn.evals.likelihood import log_likelihoods
from ironfn.evals.rolling import predict
from ironfn.evals.texts import Subject, Text, continued, windows
from ironfn.layout.table import shard
from ironfn.mesh import fake
from ironfn.mesh.axis import SINGLE
from ironfn.model.arch import Arch
from ironfn.model.tables import table
from ironfn.model.transformer import logits
from ironfn.spec.records import MoeSpec, RopeSpec, TokenizerSpec
from ironfn.types import Params
from tests import peers

T = TypeVar("T")
CONTEXT = 48
QUESTIONS: tuple[dict[str, Any], ...] = (
    {
        "query": "Question: what is dry?\n",
        "choices": ["dry sand", "dry sand and water"],
        "gold": 0,
    },  # one begins another
    {"query": "Water is ", "choices": ["wet", "a stone", "wet"], "gold": 1},  # a space at the end; the same twice
    {"query": "", "choices": ["To be or not", "to be"], "gold": 1},
    {"query": "Ein Bär\t\n ", "choices": ["trägt größere Öfen", "日本語のテキスト", "🙂🙃"], "gold": 2},
    {"query": "far " * 50, "choices": ["away " * 5, "x"], "gold": 0},  # longer than the context
    {"query": "near", "choices": ["by " * 47, "y"], "gold": 1},  # a choice that nearly fills it
    {"query": "yes or no?", "choices": ["yes", "no", "yes no"], "gold": 0},
)
PARTIAL: tuple[dict[str, Any], ...] = (
    {"context_options": ["The city men feared the men so the city", "The city men feared the men so they"],
     "continuation": "feared violence.", "gold": 0},
    {"context_options": ["The cup is in the box as the cup ", "The box is in"], "continuation": "is small", "gold": 1},
)  # fmt: skip
DATA = Path(__file__).parents[2] / "shared/data/eval"


class Pair:
    """Hold the same model twice: as lm-eval has it and as we do."""

    def __init__(self, context: int = CONTEXT, around: bool = False) -> None:
        words = [
            "the",
            "a",
            "dry",
            "wet",
            "sand",
            "water",
            "stone",
            "city",
            "men",
            "feared",
            "violence",
            "is",
            "in",
            "to",
            "be",
            "or",
            "not",
            "yes",
            "no",
            "by",
            "far",
            "near",
        ]
        draw = random.Random(0)
        text = [" ".join(draw.choice(words) for _ in range(30)) for _ in range(30)] + ["Question: what?\nAnswer: so"]
        self.tokenizer = Tokenizer.from_str(train(text, TokenizerSpec(vocab_size=330)))
        self.begin = self.tokenizer.token_to_id("<|endoftext|>")
        if around:  # as Llama's tokenizers do
            single = "<|fim_prefix|> $A"
            special = [("<|fim_prefix|>", self.tokenizer.token_to_id("<|fim_prefix|>"))]
            self.tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
        self.arch = peers.make_arch("llama", 330, context=context, kv_heads=2)
        self.model, self.params = peers.llama(self.arch, attention="sdpa")
        fast = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, eos_token="<|endoftext|>")
        self.lm = HFLM(pretrained=self.model, tokenizer=fast, batch_size=3, max_length=context, device="cpu")

    @property
    def subject(self) -> Subject:
        def encode(text: str, around: bool) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=around).ids

        return Subject(
            lambda groups: log_likelihoods(self.params, self.arch, groups, budget=100),
            encode,
            self.begin,
            self.arch.context,
        )

    def theirs(self, pairs: list[tuple[str, str]]) -> list[float]:
        requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
        return [sums for sums, _ in self.lm.loglikelihood(requests, disable_tqdm=True)]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.fixture(scope="module")
def long() -> Pair:
    return Pair(context=512)


def ask(rows: Any) -> list[Question]:
    return [question(Row(row, f"items.jsonl:{n}"), " ") for n, row in enumerate(rows, 1)]


def flat(groups: list[list[T]]) -> list[T]:
    return [each for group in groups for each in group]


def held_to_theirs(pair: Pair, questions: list[Question]) -> tuple[Accuracy, list[Answer]]:
    whole, answers = answer(questions, pair.subject)
    ours = [each for one in answers for each in one.log_likelihoods]
    theirs = pair.theirs([texts for one in questions for texts in one.pairs])
    assert ours == pytest.approx(theirs, abs=1e-4)
    return whole, answers


def test_log_likelihoods_are_those_of_lm_eval(pair: Pair) -> None:
    """With spaces at the end of a context, no context, one too long, equal choices and choices of one token."""
    whole, _ = held_to_theirs(pair, ask(QUESTIONS + PARTIAL))
    assert whole.cut == 2
    assert whole.acc_norm is None, "the two kinds together have no length to divide by"


def test_what_a_tokenizer_puts_before_a_text_comes_once() -> None:
    held_to_theirs(Pair(around=True), ask([row for row in QUESTIONS if row["query"]]))


@pytest.mark.parametrize("name", ["piqa", "winogrande", "winograd_wsc", "openbook_qa", "copa", "hellaswag_small"])
def test_real_questions_are_answered_as_by_lm_eval(long: Pair, name: str) -> None:
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:12]]
    whole, _ = held_to_theirs(long, ask(rows))
    assert whole.items == len(rows) > 3
    assert whole.cut == 0


def task(rows: tuple[dict[str, Any], ...], **fields: Any) -> dict[str, Any]:
    import datasets

    found = datasets.Dataset.from_list([dict(row) for row in rows])
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    return {
        "task": "mine",
        "custom_dataset": lambda **_: {"test": found},
        "test_split": "test",
        "output_type": "multiple_choice",
        "metric_list": metrics,
        **fields,
    }


def scores(pair: Pair, config: dict[str, Any]) -> dict[str, Any]:
    """Let lm-eval measure a task of ours, without looking through all of its own."""
    manager = TaskManager(include_defaults=False)
    return simple_evaluate(pair.lm, tasks=[config], task_manager=manager, bootstrap_iters=0)["results"]


def test_the_shares_are_those_of_lm_eval(pair: Pair) -> None:
    config = task(QUESTIONS, doc_to_text="{{query}}", doc_to_choice="choices", doc_to_target="gold")
    ((_, theirs),) = scores(pair, config).items()
    whole, _ = answer(ask(QUESTIONS), pair.subject)
    assert whole.acc_norm is not None
    assert whole.acc.value == pytest.approx(theirs["acc,none"])
    assert whole.acc_norm.value == pytest.approx(theirs["acc_norm,none"])


def test_partial_scoring_is_that_of_lm_eval(pair: Pair) -> None:
    """As their task WinoGrande does it: the choices are contexts, and what is compared is their continuation."""
    config = task(PARTIAL, doc_to_text="gold", doc_to_choice="context_options", doc_to_target="continuation")
    ((_, theirs),) = scores(pair, config).items()
    whole, _ = answer(ask(PARTIAL), pair.subject)
    assert whole.acc.value == pytest.approx(theirs["acc,none"])
    assert whole.acc_norm is None


def test_standard_errors_are_those_of_lm_eval() -> None:
    from lm_eval.api.metrics import mean_stderr

    right = [True, False, True, True, False, False, True]
    assert share(right).stderr == pytest.approx(mean_stderr(right))
    assert share([True] * 3).stderr == 0.0
    assert math.isnan(share([True]).stderr)


@pytest.mark.parametrize("tokens", [1, 47, 48, 49, 200])
def test_perplexity_is_that_of_lm_eval(pair: Pair, tokens: int) -> None:
    draw = random.Random(tokens)
    ids = [draw.randrange(4, 250) for _ in range(tokens)]
    text = pair.tokenizer.decode(ids)
    (theirs,) = pair.lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    whole, (one,) = predict([text], pair.subject, CONTEXT, 1)
    assert -one.nats == pytest.approx(theirs, rel=1e-6)
    assert one.tokens == len(pair.tokenizer.encode(text).ids)
    assert whole.byte_perplexity == pytest.approx(math.exp(-theirs / len(text.encode())))
    assert whole.bits_per_byte == pytest.approx(-theirs / len(text.encode()) / math.log(2))
    assert whole.token_perplexity == pytest.approx(math.exp(-theirs / one.tokens))


def test_windows_are_those_of_lm_eval() -> None:
    from lm_eval.utils import get_rolling_token_windows

    for size in range(1, 30):
        for length in (1, 2, 5, 8):
            for least in range(1, length + 1):
                ids = list(range(1, size + 1))
                theirs = [
                    ((*before, after[-1]), len(after))
                    for before, after in get_rolling_token_windows(ids, 0, length, least)
                ]
                ours = [(each.ids, each.scored) for each in windows(ids, 0, length, least)]
                assert ours == theirs, (size, length, least)
                scored = [i for each in windows(ids, 0, length, least) for i in each.ids[-each.scored :]]
                assert scored == ids, "each token once"


def test_many_texts_weigh_by_their_tokens(pair: Pair) -> None:
    texts = ["wet sand is wet", "no", "the city men " * 40]
    whole, each = predict(texts, pair.subject, 16, 4)
    apart = [predict([text], pair.subject, 16, 4)[0] for text in texts]
    assert whole.nats == pytest.approx(sum(one.nats for one in apart), rel=1e-6)
    assert whole.tokens == sum(one.tokens for one in apart) == sum(one.tokens for one in each)
    assert whole.documents == 3


def test_the_budget_changes_nothing(pair: Pair) -> None:
    texts = [
        [continued(pair.subject.encode, *texts, pair.begin) for texts in one.pairs] for one in ask(QUESTIONS + PARTIAL)
    ]
    params = tree.map(torch.Tensor.double, pair.params)
    small, large = (list(log_likelihoods(params, pair.arch, texts, budget=n)) for n in (1, 10**6))
    assert [len(group) for group in small] == [len(group) for group in texts]
    assert flat(small) == pytest.approx(flat(large), rel=1e-10)


@pytest.mark.parametrize("family", ["llama", "gpt2", "experts"])
def test_a_mesh_scores_the_same_on_every_rank(family: str) -> None:
    fields: dict[str, Any] = {"moe": MoeSpec(experts=4, ffn=16, capacity=1.0)} if family == "experts" else {}
    arch, params = some_model("llama" if family == "experts" else family, **fields)
    texts = [[Text((1, 2, 3, 4), 2), Text((1, 2, 5), 1)], [Text((7, 8), 1)]]
    alone = list(log_likelihoods(params, arch, texts))
    sizes = {"dp": 1, "tp": 2, "ep": 2} if family == "experts" else {"tp": 2}
    ranks = fake.run(
        lambda mesh: list(log_likelihoods(shard(params, table(False), mesh), arch, texts, mesh=mesh)),
        **sizes, sequence_parallel=True,
    )  # fmt: skip
    for rank in ranks:
        assert flat(rank) == pytest.approx(flat(alone), rel=1e-9)


def some_model(preset: str, **fields: Any) -> tuple[Arch, Params]:
    from property_tests.strategies import params_of

    arch = peers.make_arch(preset, 17, pad_vocab_to=8, context=8, **fields)
    return arch, params_of(arch)


@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("llama", {}),
        ("phi", {}),
        ("gemma2", {"windows": [3, 0], "logit_softcap": 1.5}),
        ("llama", {"rope": RopeSpec(kind="dynamic", factor=4.0, original_context=3)}),
    ],
    ids=["llama", "head bias", "soft cap", "angles by length"],
)
def test_scores_are_those_of_the_logits_of_each_text_alone(preset: str, fields: dict[str, Any]) -> None:
    arch, params = some_model(preset, **fields)
    texts = [[Text((1, 2, 3, 4, 5), 2), Text((1, 2, 3, 4), 1), Text((1, 2), 1)], [Text((7, 8, 9), 2)]]
    for text, ours in zip(flat(texts), flat(list(log_likelihoods(params, arch, texts))), strict=True):
        found = logits(params, {"tokens": torch.tensor([text.ids[:-1]])}, arch, SINGLE)[0].log_softmax(-1)
        each = found[-text.scored :].gather(1, torch.tensor(text.ids[-text.scored :])[:, None])
        assert ours == pytest.approx(float(each.sum()), rel=1e-10)


def test_rows_longer_than_learned_positions_are_texts_that_are_not() -> None:
    """The row holds far more tokens than the context; each text in it is alone within it."""
    arch, params = some_model("gpt2")
    texts = [[Text((n % 17, 2, 3, 4, 5, 6, 7, 8, 9), 3)] for n in range(20)]
    whole = [each for (each,) in log_likelihoods(params, arch, texts)]
    apart = [next(log_likelihoods(params, arch, [text]))[0] for text in texts]
    assert whole == pytest.approx(apart, rel=1e-10)


def test_experts_drop_nothing_whatever_the_neighbours() -> None:
    arch, params = some_model("llama", moe=MoeSpec(experts=4, ffn=16, capacity=0.5))
    texts = [[Text((n, 2, 3, 4, 5), 3)] for n in range(8)]
    whole = [each for (each,) in log_likelihoods(params, arch, texts)]
    apart = [next(log_likelihoods(params, arch, [text]))[0] for text in texts]
    assert whole == pytest.approx(apart, rel=1e-10)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"query": "a", "choices": ["b", "c"], "gold": 2}, "items.jsonl:1: gold is 2.* 0 to 1"),
        ({"query": "a", "choices": ["b", "c"], "gold": -1}, "gold is -1"),
        ({"query": "a", "choices": ["b", "c"], "gold": True}, "gold is True"),
        ({"query": "a", "choices": ["b", "c"], "gold": "b"}, "gold is 'b'"),
        ({"query": "a", "choices": ["b"], "gold": 0}, "two texts or more"),
        ({"query": "a", "choices": "bc", "gold": 0}, "two texts or more"),
        ({"query": "a", "choices": ["b", ""], "gold": 0}, r"choices\[1\] is empty"),
        ({"query": "a", "choices": ["b", 3], "gold": 0}, r"choices\[1\] holds int"),
        ({"query": None, "choices": ["b", "c"], "gold": 0}, "query holds NoneType"),
        ({"query": "\ud83d", "choices": ["b", "c"], "gold": 0}, "lone surrogate U[+]D83D"),
        ({"context_options": ["a", "b"], "continuation": "", "gold": 0}, "continuation is empty"),
        ({"question": "a", "answer": "b"}, "'question', 'answer' are of no known schema .*query, choices, gold"),
        ({"text": "a"}, "'perplexity' among questions"),
        (["a"], "a JSON object belongs here, not list"),
    ],
    ids=str,
)
def test_a_faulty_row_is_refused_with_its_place(row: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        ask([row])


def test_choices_that_cannot_be_scored_are_refused(pair: Pair) -> None:
    long = {"query": "a", "choices": ["far " * 60, "b"], "gold": 0}
    with pytest.raises(ValueError, match=r"items.jsonl:1: choice 0 has \d+ tokens, more than the 48"):
        answer(ask([long]), pair.subject)

    def swallowing(text: str, around: bool) -> list[int]:
        return [5] * min(1, len(text))

    nothing = Subject(pair.subject.score, swallowing, 0, 48)
    with pytest.raises(ValueError, match=r"items.jsonl:1: choice 0 adds no token to its context"):
        answer(ask([{"query": "a", "choices": ["b", "c"], "gold": 0}]), nothing)


def test_numbers_that_are_none_are_refused(pair: Pair) -> None:
    def nan(groups: Any) -> list[list[float]]:
        return [[math.nan, 0.0] for _ in groups]

    broken = Subject(nan, pair.subject.encode, pair.begin, 48)
    with pytest.raises(ValueError, match=r"items.jsonl:1: the model gives NaN"):
        answer(ask(QUESTIONS[:1]), broken)
    with pytest.raises(ValueError, match="the model gives NaN"):
        predict(["text"], broken, 8, 1)
    with pytest.raises(ValueError, match="no token"):
        predict([""], pair.subject, 8, 1)
    with pytest.raises(ValueError, match="longer than the model's context of 48"):
        predict(["text"], pair.subject, 49, 1)
    with pytest.raises(ValueError, match="choose 1 to 8"):
        predict(["text"], pair.subject, 8, 9)


@pytest.mark.parametrize(("ids", "what"), [((1, 99), "vocabulary of 17"), ((1, -1), "vocabulary"), ((1,), "1 tokens")])
def test_ids_that_the_model_cannot_read_are_refused(ids: tuple[int, ...], what: str) -> None:
    arch, params = some_model("llama")
    with pytest.raises(ValueError, match=what):
        list(log_likelihoods(params, arch, [[Text(ids, 1)]]))


def test_the_first_of_equal_choices_is_taken() -> None:
    def level(groups: Any) -> list[list[float]]:
        return [[-6.0, -6.0, -9.0] for _ in groups]

    subject = Subject(level, lambda text, around: [1] * len(text), 0, 48)
    _, (one,) = answer(ask([{"query": "q", "choices": ["ab", "abc", "abcdef"], "gold": 2}]), subject)
    assert (one.by_sum, one.by_character) == (0, 2)
    assert one.tokens == (3, 4, 7)
