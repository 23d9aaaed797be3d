"""The embedded world's judge: a script in place of a model, since the small model cannot judge.

It sees what the prompted critic is shown, question, task, queries and report, and neither gold answers nor
the world's facts: like a model it can only tell whether the work looks right.
"""

from mopd_jax.data.miniature import PEOPLE, RELATIONS, UNKNOWN, names_for
from mopd_jax.retrieval.miniature import words
from mopd_jax.team.critic import Case

_PEOPLE = frozenset(name.lower() for name in PEOPLE)


def score(case: Case) -> int:
    """Returns 0 to 10 [D]: 3 for any search, 3 more if the queries name the task's person and all its facts,
    and 4 if the report is one name of the kind that the task asks for (1 if it admits not to know). Nothing
    without a search: such a report is made up."""
    if not case.queries:
        return 0
    asked, queried = words(case.task), {word for query in case.queries for word in words(query)}
    relations = [word for word in asked if word in RELATIONS]
    people = [word for word in asked if word in _PEOPLE]
    fitting = relations and people and {people[0], *relations} <= queried
    return 3 + 3 * bool(fitting) + _report(case.summary.strip(), relations)


def _report(summary: str, relations: list[str]) -> int:
    if summary == UNKNOWN:
        return 1
    return 4 * bool(relations and summary in names_for(relations[-1]))
