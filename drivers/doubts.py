"""Tell where what a policy wrote teaches nothing: no text has a reward, all were cut off, all are worth the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import define

from .samples import Sample

PATIENCE = 10
"""Rollouts in a row without any difference of rewards before that is told."""


def unrewarded(groups: Sequence[Sequence[Sample]], where: str) -> str | None:
    """Say why no text has a reward: which graders failed how often, and how first. None where one has, or none is."""
    samples = [sample for group in groups for sample in group]
    if not samples or any(sample.reward is not None for sample in samples):
        return None
    told: list[str] = []
    for name in samples[0].parts:
        failed = [part for sample in samples if isinstance(part := sample.parts[name], str)]
        if failed:
            told.append(f"{name!r} failed {len(failed)} of {len(samples)} times, first by {failed[0].rstrip('.')}")
    return (
        f"no text of {where} has a reward, and nothing can be learned: {'; '.join(told)}. Mend that and give the same "
        "command again: the run goes on from its last checkpoint"
    )


@define
class Doubts:
    """Warn once of each thing that makes rollouts useless, and yet is no error."""

    said_cut: bool = False
    said_alike: bool = False
    alike: int = 0

    def about(self, told: Mapping[str, float], tokens: int) -> Iterator[str]:
        """Yield what there is to say of the metrics of a new rollout. tokens: those that a text may have."""
        self.alike = self.alike + 1 if told["alike"] == 1 else 0
        if told["truncated"] == 1 and not self.said_cut:
            self.said_cut = True
            yield f"no text of this rollout came to its end within {tokens} tokens: raise grpo.tokens"
        if self.alike == PATIENCE and not self.said_alike:
            self.said_alike = True
            yield (
                f"in {PATIENCE} rollouts in a row all texts of each prompt had the same reward, from which nothing is "
                "learned: take easier or harder prompts, a finer reward, more texts a group or a higher temperature"
            )
