"""Hold how a policy learns from rewards for what it writes itself."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen


@frozen
class JudgeSpec:
    """Describe a judge: another model, asked by OpenAI's API for each completion.

    url: up to and with ``/v1``. key: the name of the environment variable that holds its key, None for no key.
    prompt: what it is told, "" being ours; ``{low}`` and ``{high}`` are the ends of its scale, and it has to end its
    answer with ``Score: N``. fields: those of the row that it is shown beside prompt and completion. low, high: its
    scale; a score is where on it, 0 to 1. tokens: what it may write. tries: of one completion. failures: how many in a
    row let it rest for ``rest`` seconds. together: questions at one time. remembered: answers that are not asked again.
    """

    url: str = ""
    model: str = ""
    key: str | None = None
    prompt: str = ""
    fields: list[str] = field(factory=list)
    low: float = 0.0
    high: float = 10.0
    tokens: int = 512
    tries: int = 4
    failures: int = 8
    rest: float = 30.0
    together: int = 4
    remembered: int = 10_000


@frozen
class GraderSpec:
    """Describe a reward: what it looks at, what it may give, and what becomes of a completion that it cannot grade.

    kind: ``math`` compares with the row's field ``answer``, exactly, as numbers, then by algebra; ``find`` says what
    of the completion: what is boxed or follows ####, or else its last ``number``; ``exact`` compares as texts;
    ``keyword``, ``soft_keyword`` and ``sections`` look for ``words``; ``pattern`` matches one regular expression;
    ``function`` calls ``path``, as in package.module:function; ``code`` runs the tests in the row's field ``answer``;
    ``gym`` grades as the task of the row's field ``gym`` does; ``judge`` asks a ``judge``; ``model`` is a reward model
    in the directory ``path``.
    squash: of a reward model, the logistic function of its number, from 0 to 1, and not the number itself.
    seconds: what one completion may take; None: 60 for a judge, all tries together, 10 for others. low, high: other
    scores are failures. on_failure: leave out the ``sample`` or its whole ``group``, or ``stop``.
    """

    kind: Literal[
        "math", "exact", "keyword", "soft_keyword", "sections", "pattern", "function", "code", "gym", "judge", "model"
    ] = "math"
    weight: float = 1.0
    answer: str = "answer"
    find: Literal["final", "number"] = "final"
    words: list[str] = field(factory=list)
    pattern: str = ""
    path: str = ""
    judge: JudgeSpec = field(factory=JudgeSpec)
    squash: bool = True
    seconds: float | None = None
    low: float = 0.0
    high: float = 1.0
    on_failure: Literal["sample", "group", "stop"] = "sample"

    @property
    def reads(self) -> tuple[str, ...]:
        """Name the fields that a row has to have for this reward."""
        if self.kind in ("math", "exact", "code"):
            return (self.answer,)
        return {"gym": ("gym",), "judge": tuple(self.judge.fields)}.get(self.kind, ())


@frozen
class StageSpec:
    """Describe a stage of a run: once ``step`` steps were taken, what is written is written at ``temperature``."""

    step: int = 1
    temperature: float = 1.0


@frozen
class GrpoSpec:
    """Describe how a policy learns from rewards: where ``data.form`` is ``prompts``.

    prompts: written to at a time, ``group`` completions each, of ``tokens`` tokens at most, at ``temperature``, or that
    of the last of the ``stages`` that has begun. epochs: how often that is gone over, in ``batches`` updates each.
    refill: rounds of further prompts for those whose completions are rewarded alike (DAPO's dynamic sampling).
    scale, deviation: see `algo.advantage`. loss, low, high, dual, whole, mean, entropy: see `loss.policy`; of cispo
    ``high`` is the largest ratio less 1. kl: an estimator of the divergence from ``reference``, None being the model
    that the run begins from, with ``kl_weight`` in the loss of each token or taken off the reward of each text.
    truncated: whether completions that came to no end are learned from, or ``mask``ed; ``conditional`` gives a share
    (``truncated_share``) of those that are right and do not go round the advantage 0 (MicroCoder: Li et al. 2026, arXiv
    2603.07777). overlong: tokens before the longest over which a reward sinks by 1 (DAPO). tries: completions a prompt
    at an evaluation, for pass@tries; 0 writes the likeliest text alone. router_losses: a mixture of experts keeps its
    routers' losses. replay_routing: its tokens are computed by the experts that computed them when they were written,
    weighed as the routers weigh these now (GSPO: Zheng et al. 2025, arXiv 2507.18071, section 5.3).
    """

    prompts: int = 8
    group: int = 8
    tokens: int = 128
    temperature: float = 1.0
    stages: dict[str, StageSpec] = field(factory=dict)
    epochs: int = 1
    batches: int = 1
    refill: int = 0
    scale: Literal["group", "batch", "none"] = "group"
    deviation: Literal["sample", "population"] = "sample"
    loss: Literal["clipped", "cispo", "sapo"] = "clipped"
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    whole: bool = False
    mean: Literal["sequence", "token", "constant", "rollout"] = "sequence"
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    kl_weight: float = 0.04
    kl_in: Literal["loss", "reward"] = "loss"
    reference: str | None = None
    entropy: float = 0.0
    truncated: Literal["learn", "mask", "conditional"] = "learn"
    truncated_share: float = 0.1
    overlong: int = 0
    tries: int = 0
    router_losses: bool = False
    replay_routing: bool = False
    rewards: dict[str, GraderSpec] = field(factory=dict)

    @property
    def updates(self) -> int:
        """Count the updates that learn from what was written at one time."""
        return self.epochs * self.batches

    def temperature_at(self, step: int) -> float:
        """Return the temperature of what is written at this step."""
        begun = [stage for stage in self.stages.values() if stage.step <= step]
        return max(begun, key=lambda stage: stage.step).temperature if begun else self.temperature
