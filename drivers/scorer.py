"""Make a grader of a reward model in a directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from ironfn.data.chat import messages_of
from ironfn.data.conversation import Example
from ironfn.data.supervise import Teaching, supervised
from ironfn.rewards.model import model_reward
from ironfn.rewards.values import Completion, Grader

from .origin import home
from .trained import open_scorer
from .wording import open_wording


def scorer(path: str, device: torch.device, *, chat: bool, squash: bool) -> Grader:
    """Return a grader that gives what the reward model in a directory does: one of ours, or of Hugging Face's form.

    chat: whether a prompt that is a text is a message to it, where it has a chat template. ValueError where the
    directory holds no reward model.
    """
    place = Path(path)
    if not place.exists():
        raise ValueError(f"there is no directory {place}; name that of a reward model")
    opened = open_scorer(place, _unsaid, device=device)
    teaching = open_wording(home(place)).teaching(None, "last", "split")
    return model_reward(opened.params, opened.arch, _reading(teaching, chat), how=opened.how, squash=squash)


def _reading(teaching: Teaching, chat: bool) -> Callable[[Completion], Sequence[int]]:
    """Return how a completion is read: as the chosen text of a pair is in training."""

    def ids(completion: Completion) -> Sequence[int]:
        asked = completion.row.get("prompt", completion.prompt)
        if isinstance(asked, str) and not (chat and teaching.chat is not None):
            example = Example("completion", "it", prompt=asked, completion=completion.text)
        else:
            turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else messages_of(asked)
            told = [*cast("list[dict[str, Any]]", turns), {"role": "assistant", "content": completion.text}]
            example = Example("completion", "it", tuple(told), (*(0 for _ in turns), None))
        found = supervised(example, teaching)
        if not found or not len(found[-1].ids):
            raise ValueError("nothing of the text can be read by the reward model")
        return found[-1].ids.tolist()

    return ids


def _unsaid(line: str) -> None:
    pass
