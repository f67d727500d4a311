"""The templates for models without one: the families' own text, marked for training, and nothing left out unsaid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer

from ironfn.data.chat import chat_of
from ironfn.data.conversation import Fault, parse
from ironfn.data.readers import Row
from ironfn.data.supervise import Teaching, supervised
from ironfn.data.templates import TEMPLATES, template_of
from ironfn.data.tokenizer import parse as vocabulary_of

from .test_chat import SPECIALS, TOOLS, tokenizer_json

TOLD = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "+ 3?"},
    {"role": "assistant", "content": "7"},
]
# As the families' own templates write it; see their tokenizer_config.json.
WRITTEN = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    "4<|im_end|>\n<|im_start|>user\n+ 3?<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\n2 + 2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n+ 3?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "7<|eot_id|>",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\n2 + 2?<end_of_turn>\n<start_of_turn>model\n4<end_of_turn>\n"
    "<start_of_turn>user\n+ 3?<end_of_turn>\n<start_of_turn>model\n7<end_of_turn>\n",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\n2 + 2?</s>\n<|assistant|>\n4</s>\n<|user|>\n+ 3?</s>\n"
    "<|assistant|>\n7</s>\n",
    "alpaca": "Be brief.\n\n### Instruction:\n2 + 2?\n\n### Response:\n4</s>\n\n### Instruction:\n+ 3?\n\n"
    "### Response:\n7</s>\n\n",
}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "zephyr": "</s>", "alpaca": "</s>"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer.from_buffer(tokenizer_json())
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<start_of_turn>", "<end_of_turn>")])
    return made


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_named_template_writes_what_its_family_does_and_trains_the_answers(name: str, tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer.to_str().encode(), "t")
    chat = chat_of(vocabulary, template_of(name, vocabulary), SPECIALS)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATES[name][0], **SPECIALS
    )
    assert chat.render(TOLD, add_generation_prompt=False).text == WRITTEN[name]
    asked: Any = theirs.apply_chat_template(TOLD[:2], tokenize=False, add_generation_prompt=True)
    assert WRITTEN[name].startswith(asked + "4")
    (text,) = supervised(parse(Row({"messages": TOLD}, "p"), {}), Teaching(vocabulary, chat))
    right: Any = theirs.apply_chat_template(TOLD, return_assistant_tokens_mask=True, return_dict=True)
    learned = [i for i, mine in zip(right["input_ids"], right["assistant_masks"], strict=True) if mine]
    assert text.ids[text.trained].tolist() == learned
    assert theirs.decode(learned) == f"4{ENDS[name]}7{ENDS[name]}"
    for more in (
        {"tools": TOOLS},
        {"messages": [*TOLD, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
    ):
        with pytest.raises(Fault, match=r"this template (tells of|writes) no tool"):
            supervised(parse(Row({"messages": TOLD, **more}, "p"), {}), Teaching(vocabulary, chat))
    chat.renderer.close()


def test_a_template_whose_tokens_are_missing_is_refused(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(tokenizer_json(), "t")
    with pytest.raises(ValueError, match="gemma needs the tokens <start_of_turn>, <end_of_turn>"):
        template_of("gemma", vocabulary)
    with pytest.raises(ValueError, match="'vicuna' is neither one of chatml, llama3"):
        template_of("vicuna", vocabulary)
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    assert template_of(str(tmp_path / "a.jinja"), vocabulary) == "{{ messages }}"
