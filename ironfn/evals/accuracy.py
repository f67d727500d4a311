"""Answer questions by log-likelihood, and count how many answers are right."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

from ironfn.evals.items import Question
from ironfn.evals.texts import Subject, Text, continued


@frozen
class Share:
    """Hold a share and its standard error, NaN for a single item."""

    value: float
    stderr: float


@frozen
class Answer:
    """Hold the log-likelihoods of a question's choices, in nats, and the numbers of the choices made.

    by_sum: the likeliest continuation. by_character: the one with most nats a character of the choice; None for partial
    scoring. The first of equals. tokens: scored, of each choice.
    """

    question: Question
    log_likelihoods: tuple[float, ...]
    tokens: tuple[int, ...]
    by_sum: int
    by_character: int | None


@frozen
class Accuracy:
    """Hold how well questions were answered.

    acc: the likeliest continuation is the right one. acc_norm: the same by nats a character, None where a question has
    the same continuation for all choices. cut: texts that lost their beginning, being longer than the context.
    """

    items: int
    acc: Share
    acc_norm: Share | None
    cut: int


def answer(questions: Sequence[Question], subject: Subject) -> tuple[Accuracy, list[Answer]]:
    """Answer questions, of which there is one at least.

    ValueError, with its place, for a choice of no token or of too many, and where the model gives NaN.
    """
    groups = [_texts(question, subject) for question in questions]
    scores = subject.score(groups)
    answers = [
        _answer(question, sums, [text.scored for text in texts])
        for question, texts, sums in zip(questions, groups, scores, strict=True)
    ]
    right = [each.by_sum == each.question.gold for each in answers]
    normed = [each.by_character == each.question.gold for each in answers]
    whole = all(question.characters is not None for question in questions)
    cut = sum(len(text.ids) > subject.context + 1 for texts in groups for text in texts)
    return Accuracy(len(answers), share(right), share(normed) if whole else None, cut), answers


def _texts(question: Question, subject: Subject) -> list[Text]:
    texts = [continued(subject.encode, before, after, subject.begin) for before, after in question.pairs]
    for number, text in enumerate(texts):
        if text.scored < 1:
            raise ValueError(f"{question.place}: choice {number} adds no token to its context; use another delimiter")
        if text.scored > subject.context:
            raise ValueError(
                f"{question.place}: choice {number} has {text.scored} tokens, more than the {subject.context} that the "
                "model reads; leave the question out"
            )
    return texts


def _answer(question: Question, sums: Sequence[float], tokens: Sequence[int]) -> Answer:
    if any(math.isnan(each) for each in sums):
        raise ValueError(f"{question.place}: the model gives NaN; its weights are damaged or overflow their dtype")
    normed = None
    if question.characters is not None:
        per = [each / size for each, size in zip(sums, question.characters, strict=True)]
        normed = per.index(max(per))
    return Answer(question, tuple(sums), tuple(tokens), list(sums).index(max(sums)), normed)


def share(right: Sequence[bool]) -> Share:
    """Return the share of True and its standard error, sqrt(p (1 - p) / (n - 1)).

    >>> share([True, False, True, True, False])
    Share(value=0.6, stderr=0.2449489742783178)
    """
    n, p = len(right), sum(right) / len(right)
    return Share(p, math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else math.nan)
