"""Let a policy write several completions after each of many prompts, and keep with what probability it did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from attrs import frozen

from ironfn.generate.engine import Generator, complete
from ironfn.generate.queue import Limits, Reason, Request, Token
from ironfn.generate.sampling import Sampling


@frozen
class Written:
    """Hold a completion. log_probs: of each id, at the sampling's temperature, in nats. reason: why it ended.

    experts: where the generator tells them, those that computed the id before each id, int16 [ids, layers with experts,
    choices]. trunk: of the first completion of a prompt, those of the ids before the prompt's last.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    reason: Reason
    experts: bytes = b""
    trunk: bytes = b""


def roll_out(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    n: int,
    limit: int,
    sampling: Sampling,
    stop: frozenset[int],
    streams: Sequence[tuple[int | str, ...]],
    *,
    limits: Limits | None = None,
) -> list[list[Written]]:
    """Return ``n`` completions of each prompt, of ``limit`` ids at most, the one of ``stop`` that ends them included.

    A prompt is computed once for all of its completions. streams: a key for each prompt: with the seed and the number
    of the completion it decides what is drawn, whatever is written beside it. ValueError, as `engine.submit`, for a
    prompt that the model cannot take.
    """
    requests = [
        Request(key=number, prompt=tuple(prompt), limit=limit, sampling=sampling, stop=stop, n=n, stream=stream)
        for number, (prompt, stream) in enumerate(zip(prompts, streams, strict=True))
    ]
    ids: dict[tuple[Hashable, int], list[int]] = defaultdict(list)
    log_probs: dict[tuple[Hashable, int], list[float]] = defaultdict(list)
    experts: dict[tuple[Hashable, int], list[bytes]] = defaultdict(list)
    reasons: dict[tuple[Hashable, int], Reason] = {}
    for event in complete(generator, requests, limits=limits):
        place = event.key, event.number
        if isinstance(event, Token):
            ids[place].append(event.id)
            log_probs[place].append(event.log_prob)
            experts[place].append(event.experts)
        else:
            reasons[place] = event.reason

    def of(k: int, i: int) -> Written:
        prompt, *later = experts[k, i] or [b""]
        first = len(prompt) // len(prompts[k]) * (len(prompts[k]) - 1)
        own, trunk = b"".join([prompt[first:], *later]), prompt[:first] if i == 0 else b""
        return Written(tuple(ids[k, i]), tuple(log_probs[k, i]), reasons[k, i], own, trunk)

    return [[of(k, i) for i in range(n)] for k in range(len(prompts))]
