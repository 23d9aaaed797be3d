"""Who learns from what: which objectives, rewards and frozen models of a config belong together."""

from collections.abc import Iterator

from mopd_jax.config import SCRIPTED, Config, Kind, Objective, Wording, Workflow

Finding = tuple[str, str]
"""Dotted field inside its config, and what is wrong with it."""

ROLES = {
    Workflow.CASCADE: ("searcher", "answerer"),
    Workflow.HIERARCHY: ("leader", "searcher", "answerer"),
    Workflow.SINGLE: ("agent",),
}
"""Who speaks in a workflow."""
REWARDED = (Objective.GRPO, Objective.CRITIC)
"""Objectives whose rewards are compared in groups."""


def objectives(c: Config, kind: Kind) -> Iterator[Finding]:
    """Yields what is wrong with them; only a reinforce phase has roles with objectives."""
    if kind is not Kind.REINFORCE:
        return
    yield from _absent(c)
    yield from _groups(c)
    yield from _frozen(c)
    if c.team.workflow is Workflow.SINGLE and c.team.candidates != 1:
        yield "team.candidates", "must be 1: the single agent of team.workflow = single answers once"
    if c.tree.rounds and c.team.workflow is not Workflow.SINGLE:
        yield "tree.rounds", "must be 0: only the single agent of team.workflow = single branches"


def _absent(c: Config) -> Iterator[Finding]:
    """Roles that do not speak, or cannot learn so."""
    speaking = ROLES[c.team.workflow]
    for role in ("leader", "searcher", "answerer", "agent"):
        objective = getattr(c.learn, role)
        if role not in speaking and objective is not Objective.NONE:
            why = f"must be none: team.workflow = {c.team.workflow.value} has no {role}"
            yield f"learn.{role}", why
        elif role != "searcher" and objective in (Objective.OPD, Objective.CRITIC):
            yield f"learn.{role}", "must be grpo or none: only the Searcher is distilled or judged"
    if all(getattr(c.learn, role) is Objective.NONE for role in speaking):
        yield f"learn.{speaking[0]}", "no role has an objective, so nothing would be learnt"


def _groups(c: Config) -> Iterator[Finding]:
    """GRPO compares the rows of a group; a group of one teaches nothing."""
    for role in ("leader", "searcher", "agent"):
        objective = getattr(c.learn, role)
        if objective in REWARDED and c.train.workflows < 2:
            why = f"learn.{role} = {objective.value} compares workflows of one question: at least 2"
            yield "train.workflows", why
    if c.learn.answerer is Objective.GRPO and c.team.candidates < 2:
        yield "team.candidates", "learn.answerer = grpo compares candidates of one answer request: at least 2"


def _frozen(c: Config) -> Iterator[Finding]:
    """Frozen models that an objective needs, and those that nobody does."""
    learn = c.learn
    distilled = learn.searcher is Objective.OPD
    if distilled and not c.model.teacher:
        yield "model.teacher", "learn.searcher = opd needs a teacher"
    if c.model.teacher and not distilled:
        yield "model.teacher", "no role is distilled (opd), so it would score nothing: leave it empty"
    if distilled and not learn.beta > 0:
        yield "learn.beta", "must be above 0: it weighs the only signal of learn.searcher = opd"
    yield from _judge(c)
    if c.model.searcher:
        yield (
            "model.searcher",
            "plays in an evaluation only, a team that learns speaks itself: leave it empty",
        )
    penalised = [role for role in ROLES[c.team.workflow] if _pays_kl(c, role)]
    if penalised and learn.kl > 0 and not c.model.reference:
        yield "model.reference", f"learn.kl = {learn.kl} needs a reference; 0 turns the penalty off"


def _judge(c: Config) -> Iterator[Finding]:
    if c.learn.searcher is Objective.CRITIC and not c.model.judge:
        yield "model.judge", "learn.searcher = critic needs a judge: name a model, the base by default"
    if c.model.judge and c.learn.searcher is not Objective.CRITIC:
        yield "model.judge", "no role learns from a judge (critic), so it would score nothing: leave it empty"
    if c.model.judge == SCRIPTED and c.team.wording is not Wording.MINIATURE:
        yield "model.judge", "knows only the embedded world: name a model"


def _pays_kl(c: Config, role: str) -> bool:
    return getattr(c.learn, role) in REWARDED and (role != "searcher" or c.learn.searcher_kl)
