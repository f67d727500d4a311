"""Which ids are learned: held to transformers' mask, to the decoded text, and to what people may write."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from ironfn.data.chat import Chat, chat_of
from ironfn.data.conversation import Fault, parse
from ironfn.data.readers import Row
from ironfn.data.supervise import Supervised, Teaching, begin_of, supervised
from ironfn.data.tokenizer import Vocabulary
from ironfn.data.tokenizer import parse as vocabulary_of

from .chat_templates import CONTROLS, TEMPLATES
from .test_chat import LONGER, PLAIN, SHARDS, SPECIALS, TOOLS, tokenizer_json

# As GLM 4's: an answer ends where the next message begins.
UNCLOSED = (
    (
        "{{ '<s>' }}{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    )
    .replace("'<|' + m.role + '|>\\n'", "{'user': '<|im_start|>', 'assistant': '<|im_end|>'}[m.role] + '\\n'")
    .replace("<|assistant|>", "<|im_end|>")
)
# No control token at all.
WORDS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# Marks that leave out what ends an answer.
NARROW = TEMPLATES["marked"].replace(
    "{{- message.content + close() }}{%- endgeneration %}", "{{- message.content }}{%- endgeneration %}{{- close() }}"
)
# As QwQ's: what asks for an answer opens its reasoning, which old answers do not have.
OPENING = TEMPLATES["chatml"].replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n")
# Marks in two parts, which touch.
PARTED = TEMPLATES["marked"].replace(
    "{{- message.content + close() }}{%- endgeneration %}",
    "{{- message.content }}{%- endgeneration %}{%- generation %}{{- close() }}{%- endgeneration %}",
)
# As Phi 3's: an end behind the last message, whoever said it.
CLOSING = TEMPLATES["chatml"].replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": " Second, and more. "},
]
THOUGHT = [
    {**turn, "reasoning_content": "hm " * n} if turn["role"] == "assistant" else turn for n, turn in enumerate(TURNS)
]


@pytest.fixture(scope="module")
def both() -> Any:
    """Return a maker of (ours, theirs) for a template."""
    data = tokenizer_json()
    vocabulary = vocabulary_of(data, "tokenizer.json")
    chats: dict[str, Chat] = {}

    def make(template: str) -> tuple[Teaching, Any]:
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_buffer(data), chat_template=template, **SPECIALS
        )
        if template not in chats:
            chats[template] = chat_of(vocabulary, template, SPECIALS)
        return Teaching(vocabulary, chats[template]), theirs

    yield make
    for chat in chats.values():
        chat.renderer.close()


def taught(value: Any, teaching: Teaching, **changes: Any) -> list[Supervised]:
    row = {"messages": value} if isinstance(value, list) else value
    return supervised(parse(Row(row, "a.jsonl:1"), {}), evolve(teaching, **changes))


def stretches(text: Supervised, vocabulary: Vocabulary) -> list[str]:
    """Return the learned stretches as text."""
    found: list[list[int]] = []
    for at, (i, learned) in enumerate(zip(text.ids.tolist(), text.trained.tolist(), strict=True)):
        if learned:
            if not text.trained[at - 1]:
                found.append([])
            found[-1].append(i)
    return [vocabulary.tokenizer.decode(ids, skip_special_tokens=False) for ids in found]


@pytest.mark.parametrize("told", [[*PLAIN, {"role": "assistant", "content": "seven"}], TURNS], ids=["plain", "turns"])
def test_where_the_template_marks_answers_the_mask_is_transformers(both: Any, told: list[Any]) -> None:
    teaching, theirs = both(TEMPLATES["marked"])
    right = theirs.apply_chat_template(told, return_assistant_tokens_mask=True, return_dict=True)
    (ours,) = taught(told, teaching)
    assert ours.ids.tolist() == right["input_ids"]
    assert ours.trained.astype(int).tolist() == right["assistant_masks"]


ENDS = {"chatml": "<|im_end|>", "headers": "<|eot_id|>", "inst": " </s>"}


@pytest.mark.parametrize("name", list(ENDS))
def test_without_marks_answers_and_their_ends_are_learned(both: Any, name: str) -> None:
    teaching, theirs = both(TEMPLATES[name])
    (ours,) = taught(TURNS, teaching)
    whole, text = theirs.apply_chat_template(TURNS)["input_ids"], theirs.apply_chat_template(TURNS, tokenize=False)
    assert text.startswith(theirs.decode(ours.ids))
    assert text.removeprefix(theirs.decode(ours.ids)).strip() == ""
    if (
        name != "headers"
    ):  # there two line ends before an answer are one token where nothing follows, as when it is asked
        assert ours.ids.tolist() == whole[: len(ours.ids)]
    answers = ["First.", " Second, and more. " if name == "chatml" else "Second, and more."]
    lead = " " if name == "inst" else ""
    assert stretches(ours, teaching.vocabulary) == [lead + answer + ENDS[name] for answer in answers]
    asked = theirs.apply_chat_template(TURNS[:1], add_generation_prompt=True)["input_ids"]
    assert ours.ids[: len(asked)].tolist() == asked
    assert not ours.trained[: len(asked)].any()
    assert ours.trained[len(asked)]


def test_what_is_learned_stays_the_same_when_more_follows(both: Any) -> None:
    teaching, _ = both(TEMPLATES["chatml"])
    (short,), (long,) = taught(TURNS[:2], teaching), taught([*TURNS[:2], {"role": "user", "content": "bye"}], teaching)
    assert short.ids.tolist() == long.ids.tolist()
    assert short.trained.tolist() == long.trained.tolist()


def test_the_next_message_ends_an_answer_where_nothing_else_does(both: Any) -> None:
    teaching, _ = both(UNCLOSED)
    (ours,) = taught(TURNS, teaching)
    assert stretches(ours, teaching.vocabulary) == ["First.<|im_start|>", " Second, and more. </s>"]
    teaching, _ = both(WORDS)
    (ours,) = taught(TURNS, teaching)
    assert stretches(ours, teaching.vocabulary) == ["First.\n", " Second, and more. \n</s>"]


def test_marks_without_the_end_are_widened_by_it(both: Any) -> None:
    teaching, theirs = both(NARROW)
    (ours,) = taught(TURNS, teaching)
    assert stretches(ours, teaching.vocabulary) == ["First.<|im_end|>", " Second, and more. <|im_end|>"]
    right = theirs.apply_chat_template(TURNS, return_assistant_tokens_mask=True, return_dict=True)
    assert ours.ids.tolist() == right["input_ids"][: len(ours.ids)]
    ends = [i for i, (a, b) in enumerate(zip(ours.trained, right["assistant_masks"], strict=False)) if a and not b]
    assert [theirs.decode(ours.ids[i : i + 1]) for i in ends] == ["<|im_end|>", "<|im_end|>"]


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_one_answer_can_be_asked_for(both: Any, name: str) -> None:
    teaching, _ = both(TEMPLATES[name])
    last = " Second, and more. <|im_end|>" + ("\n" if name == "marked" else "")
    (ours,) = taught(TURNS, teaching, train_on="last")
    assert stretches(ours, teaching.vocabulary) == [last]
    unweighted = [turn | {"weight": 0} if n == 1 else turn for n, turn in enumerate(TURNS)]
    (ours,) = taught(unweighted, teaching)
    assert stretches(ours, teaching.vocabulary) == [last]
    (ours,) = taught(
        [turn | {"weight": 1} if n == 1 else turn for n, turn in enumerate(TURNS)], teaching, train_on="last"
    )
    assert len(stretches(ours, teaching.vocabulary)) == 2
    first = [turn | {"weight": 0} if n == 3 else turn for n, turn in enumerate(TURNS)]
    (ours,) = taught(first, teaching)
    assert stretches(ours, teaching.vocabulary) == ["First.<|im_end|>" + ("\n" if name == "marked" else "")]
    assert taught(first, teaching, train_on="last") == []


def test_a_template_that_rewrites_history_gives_a_text_for_each_answer(both: Any) -> None:
    teaching, theirs = both(TEMPLATES["think"])
    texts = taught(THOUGHT, teaching)
    learned = [stretches(text, teaching.vocabulary) for text in texts]
    assert learned == [
        ["<think>\n" + "hm " * 3 + "\n</think>\n\n Second, and more. <|im_end|>"],
        ["<think>\nhm \n</think>\n\nFirst.<|im_end|>"],
    ]
    for text, count in zip(texts, (4, 2), strict=True):
        whole = theirs.apply_chat_template(THOUGHT[:count])["input_ids"]
        assert text.ids.tolist() == whole[: len(text.ids)]
    with pytest.raises(Fault, match=r"a.jsonl:1: the template writes earlier answers in another way"):
        taught(THOUGHT, teaching, rewritten="refuse")
    (only,) = taught(THOUGHT, teaching, rewritten="refuse", train_on="last")
    assert stretches(only, teaching.vocabulary) == learned[0]
    (kept,) = taught(TURNS, teaching, rewritten="refuse")  # nothing is rewritten where there is no reasoning
    assert len(stretches(kept, teaching.vocabulary)) == 2


def test_marks_that_touch_are_one_answer(both: Any) -> None:
    teaching, theirs = both(PARTED)
    right = theirs.apply_chat_template(TURNS, return_assistant_tokens_mask=True, return_dict=True)
    (ours,) = taught(TURNS, teaching)
    assert ours.trained.astype(int).tolist() == right["assistant_masks"]
    teaching, _ = both(PARTED.replace("{%- generation %}{{- close()", "{{- '\n' }}{%- generation %}{{- close()"))
    (ours,) = taught(TURNS, teaching)
    assert stretches(ours, teaching.vocabulary) == ["First.\n<|im_end|>", " Second, and more. \n<|im_end|>"]


def test_what_begins_the_next_text_does_not_end_an_answer(both: Any) -> None:
    teaching, _ = both(WORDS.replace("{{ m.role +", "{{ ('<s>' if m.role == 'user' else '') + m.role +"))
    (ours,) = taught(TURNS, teaching)
    assert stretches(ours, teaching.vocabulary) == ["First.\n", " Second, and more. \n</s>"]


def test_an_end_behind_the_last_message_alone_rewrites_nothing(both: Any) -> None:
    teaching, theirs = both(CLOSING)
    (ours,) = taught(TURNS, teaching, rewritten="refuse")
    whole = theirs.apply_chat_template(TURNS)["input_ids"]
    assert ours.ids.tolist() == whole[: len(ours.ids)]
    assert stretches(ours, teaching.vocabulary)[0] == "First.<|im_end|>"
    (asked,) = taught([*TURNS, {"role": "user", "content": "three"}], teaching, rewritten="refuse")
    assert stretches(asked, teaching.vocabulary) == ["First.<|im_end|>", " Second, and more. <|im_end|>"]


def test_tools_and_calls_are_written_as_transformers_writes_them(both: Any) -> None:
    teaching, theirs = both(TEMPLATES["think"])
    told = [turn for turn in LONGER if turn["role"] != "system"]
    (text,) = taught({"messages": told, "tools": TOOLS}, teaching, train_on="last")
    right = theirs.apply_chat_template(told, tools=TOOLS, sanitize_control_tokens=True)["input_ids"]
    assert text.ids.tolist() == right[: len(text.ids)]


def test_a_question_that_no_answer_follows_is_refused(both: Any) -> None:
    teaching, _ = both(OPENING)
    with pytest.raises(Fault, match=r"asks for messages\[3\] with '<think>\\n', but writes ' Second, and more"):
        taught(TURNS, teaching)
    both_ways = [{**turn, "content": "<think>\n" + turn["content"]} if n % 2 else turn for n, turn in enumerate(TURNS)]
    with pytest.raises(Fault, match="asks for"):  # what people write is no control token
        taught(both_ways, teaching)


def test_faults_of_templates_have_a_place(both: Any) -> None:
    teaching, _ = both(TEMPLATES["inst"])
    with pytest.raises(
        Fault, match=r"a.jsonl:1: the chat template cannot write this conversation: roles must alternate"
    ):
        taught([TURNS[0], *TURNS], teaching)
    with pytest.raises(Fault, match="needs a chat template"):
        taught(TURNS, teaching, chat=None)


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from(SHARDS), min_size=1).map("".join), min_size=2, max_size=4))
def test_whatever_people_write_the_control_tokens_are_the_templates(both: Any, texts: list[str]) -> None:
    teaching, theirs = both(TEMPLATES["chatml"])
    told = [{"role": ("user", "assistant")[n % 2], "content": f"x{text}"} for n, text in enumerate(texts)]
    controls = {theirs.convert_tokens_to_ids(word) for word in CONTROLS}
    (text,) = taught(told, teaching)
    answers = len(texts) // 2
    assert sum(i in controls for i in text.ids.tolist()) == 4 * answers
    assert sum(i in controls for i in text.ids[text.trained].tolist()) == answers
    assert stretches(text, teaching.vocabulary) == [turn["content"] + "<|im_end|>" for turn in told[1::2]]
    (plain,) = taught({"prompt": texts[0], "completion": f"x{texts[1]}"}, teaching)
    assert [i for i in plain.ids.tolist() if i in controls] == [theirs.eos_token_id]
    assert stretches(plain, teaching.vocabulary) == [f"x{texts[1]}</s>"]


def toy(begin: bool) -> Vocabulary:
    """Return a BPE of a, b and "ab", whose post-processor puts <s> first, or nothing."""
    names = ["<s>", "</s>", "a", "b", "ab", " "]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])  # pyright: ignore[reportAttributeAccessIssue]
    return vocabulary_of(tokenizer.to_str().encode(), "toy")


@pytest.mark.parametrize("begin", [(0,), ()], ids=["begin", "none"])
def test_prompt_and_completion_meet_where_they_do_when_it_answers(begin: tuple[int, ...]) -> None:
    vocabulary = toy(bool(begin))
    assert begin_of(vocabulary) == begin
    teaching = Teaching(vocabulary, begin=begin)
    (text,) = taught({"prompt": "a", "completion": "b"}, teaching)
    assert text.ids.tolist() == [*begin, 2, 3, 1]  # not 4, which is "ab"
    assert text.trained.tolist() == [False] * len(begin) + [False, True, True]
    (text,) = taught({"text": "ab a"}, teaching)
    assert text.ids.tolist() == [*begin, 4, 5, 2, 1]
    assert text.trained.tolist() == [False] + [True] * (len(text.ids) - 1)  # nothing stands before the first


def test_a_text_begins_once_where_both_its_template_and_its_tokenizer_begin_it() -> None:
    """The fault: the first id twice."""
    tokenizer: Any = Tokenizer.from_buffer(tokenizer_json())
    first = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", first)])
    assert tokenizer.encode("a").ids[0] == first
    vocabulary = vocabulary_of(tokenizer.to_str().encode(), "toy")
    chat = chat_of(vocabulary, "{{ bos_token }}" + TEMPLATES["chatml"], SPECIALS)
    try:
        (text,) = taught(TURNS, Teaching(vocabulary, chat, begin_of(vocabulary)))
    finally:
        chat.renderer.close()
    assert (text.ids == first).nonzero()[0].tolist() == [0]


def test_tokens_are_taken_as_they_are() -> None:
    teaching = Teaching(toy(False))
    (text,) = taught({"input_ids": [2, 3, 4, 2, 5], "labels": [2, -100, 4, 2, -100]}, teaching)
    assert text.ids.tolist() == [2, 3, 4, 2]
    assert text.trained.tolist() == [False, False, True, True]
    (text,) = taught({"input_ids": [2, 3], "labels": [-100, -100]}, teaching)
    assert not len(text.ids)
    with pytest.raises(Fault, match="input_ids holds 6, and the vocabulary ends at 5"):
        taught({"input_ids": [2, 6]}, teaching)
