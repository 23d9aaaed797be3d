"""C-MAS and H-MAS on scripted turns: who is asked what, within which limits, and how it ends."""

import pytest

from mopd_jax.config import TeamConfig, Workflow
from mopd_jax.retrieval.search import Document
from mopd_jax.team.episode import (
    Message,
    Outcome,
    Role,
    SampleRequest,
    SearchRequest,
    Session,
    Status,
    Stop,
    Turn,
)
from mopd_jax.team.roles import Prompts
from mopd_jax.team.workflows import WORKFLOWS, cascade, hierarchy, single
from tests.fakes import DOCUMENTS, play

PROMPTS = Prompts()
QUESTION = "Who wrote the book?"
SEARCH, SUMMARY, ANSWER = "<search>q</search>", "<summary>found</summary>", "<answer>Austen</answer>"
TASK, REQUEST = "<task>sub</task>", "<request_answer></request_answer>"
CONTEXT = Turn("", Stop.CONTEXT)


def run_cascade(*script, candidates=1, documents=DOCUMENTS, **limits):
    return play(cascade(QUESTION, TeamConfig(**limits), PROMPTS, candidates), script, documents)


def run_hierarchy(*script, candidates=1, **limits):
    return play(hierarchy(QUESTION, TeamConfig(**limits), PROMPTS, candidates), script)


def closed(played, role):
    return [s for s in played.outcome.sessions if s.role is role]


def notes_of(played):
    """What the Answerer was told."""
    return played.asked(Role.ANSWERER)[0].messages[1].content


def test_cascade_asks_for_each_turn_with_its_whole_request():
    played = run_cascade("I look. " + SEARCH, SUMMARY, (ANSWER, "<answer>Eliot</answer>"), candidates=2)
    opened = (Message("system", PROMPTS.searcher), Message("user", "Task: Who wrote the book?"))
    note = "Question: Who wrote the book?\n\n1. Task: Who wrote the book?\nResult: found"
    asked = (Message("system", PROMPTS.answerer), Message("user", note))
    assert played.requests == [
        SampleRequest(Role.SEARCHER, 0, opened, 256, 1),
        SearchRequest("q"),
        SampleRequest(Role.SEARCHER, 0, (Message("user", "", DOCUMENTS),), 256, 1),
        SampleRequest(Role.ANSWERER, 1, asked, 64, 2),
    ]
    assert played.outcome == Outcome(
        sessions=(
            Session(Role.SEARCHER, 0, 0, Status.FINISHED, 1, "found", task=QUESTION),
            Session(Role.ANSWERER, 1, 0, Status.FINISHED, 0, "Austen"),
            Session(Role.ANSWERER, 1, 1, Status.FINISHED, 0, "Eliot"),
        ),
        answers=("Austen", "Eliot"),
        searches=1,
    )


def test_hierarchy_opens_a_fresh_searcher_per_task_and_collects_notes():
    script = ["<task>t1</task>", SEARCH, SEARCH, "<summary>s1</summary>", "<task>t2</task>"]
    script += [SEARCH, "<summary>s2</summary>", REQUEST, (ANSWER,) * 5]
    played = run_hierarchy(*script, candidates=5)
    leader = played.asked(Role.LEADER)
    assert [turn.messages for turn in leader] == [
        (Message("system", PROMPTS.leader), Message("user", QUESTION)),
        (Message("user", '<result task="1">s1</result>'),),
        (Message("user", '<result task="2">s2</result>'),),
    ]
    assert [(turn.session, turn.max_tokens) for turn in leader] == [(0, 256)] * 3
    searcher = played.asked(Role.SEARCHER)
    assert [turn.session for turn in searcher] == [1, 1, 1, 2, 2]
    assert searcher[3].messages == (Message("system", PROMPTS.searcher), Message("user", "Task: t2"))
    assert notes_of(played) == (
        "Question: Who wrote the book?\n\n1. Task: t1\nResult: s1\n2. Task: t2\nResult: s2"
    )
    assert played.outcome.sessions == (
        Session(Role.LEADER, 0, 0, Status.FINISHED, 0, ""),
        Session(Role.SEARCHER, 1, 0, Status.FINISHED, 2, "s1", task="t1"),
        Session(Role.SEARCHER, 2, 0, Status.FINISHED, 1, "s2", task="t2"),
        *(Session(Role.ANSWERER, 3, candidate, Status.FINISHED, 0, "Austen") for candidate in range(5)),
    )
    assert played.outcome.answers == ("Austen",) * 5
    assert played.outcome.searches == 3


def test_leader_may_ask_at_once():
    played = run_hierarchy(REQUEST, ANSWER)
    assert notes_of(played) == "Question: Who wrote the book?"
    assert played.outcome.answers == ("Austen",) and played.outcome.searches == 0


def test_after_four_tasks_only_the_answer_request_is_left():
    played = run_hierarchy(*[TASK, SUMMARY] * 4, REQUEST, ANSWER)
    contents = [turn.messages[-1].content for turn in played.asked(Role.LEADER)]
    assert [PROMPTS.ask_answer in content for content in contents] == [False] * 4 + [True]
    assert contents[-1] == f'<result task="4">found</result>\n{PROMPTS.ask_answer}'
    assert played.outcome.answers == ("Austen",)


def test_a_fifth_task_is_malformed_and_ends_the_workflow():
    played = run_hierarchy(*[TASK, SUMMARY] * 4, TASK)
    (leader,) = closed(played, Role.LEADER)
    assert leader.status is Status.MALFORMED
    assert leader.reason == "<task> where only <request_answer> is accepted"
    assert played.outcome.answers == ()


def test_after_four_searches_only_a_summary_is_accepted():
    played = run_cascade(*[SEARCH] * 4, SUMMARY, ANSWER)
    last = [turn.messages[-1] for turn in played.asked(Role.SEARCHER)]
    assert [m.content for m in last] == ["Task: Who wrote the book?", "", "", "", PROMPTS.ask_summary]
    assert [m.documents for m in last] == [(), *[DOCUMENTS] * 4]
    assert played.outcome.searches == 4


def test_a_fifth_search_is_malformed_and_not_executed():
    played = run_cascade(*[SEARCH] * 5, ANSWER)
    (searcher,) = closed(played, Role.SEARCHER)
    assert (searcher.status, searcher.searches, searcher.body) == (Status.MALFORMED, 4, "")
    assert searcher.reason == "<search> where only <summary> is accepted"
    assert len(played.queries) == 4


def test_the_workflow_cap_asks_a_searcher_for_its_summary():
    """Cap 5, 4 per session: the second session may search once, the third not at all."""
    script = [TASK, *[SEARCH] * 4, SUMMARY, TASK, SEARCH, SUMMARY, TASK, SUMMARY, REQUEST, ANSWER]
    played = run_hierarchy(*script, workflow_searches=5)
    assert [s.searches for s in closed(played, Role.SEARCHER)] == [4, 1, 0]
    assert played.outcome.searches == len(played.queries) == 5
    first_of_third = next(t for t in played.asked(Role.SEARCHER) if t.session == 3)
    assert first_of_third.messages[1].content == f"Task: sub\n{PROMPTS.ask_summary}"


def test_twelve_searches_are_the_default_cap():
    script = [TASK, *[SEARCH] * 4, SUMMARY] * 3 + [TASK, SEARCH, REQUEST, ANSWER]
    played = run_hierarchy(*script)
    assert played.outcome.searches == 12
    assert [s.status for s in closed(played, Role.SEARCHER)] == [Status.FINISHED] * 3 + [Status.MALFORMED]


def test_a_repeated_query_is_not_malformed_and_a_turn_without_search_runs_none():
    played = run_cascade(SEARCH, SEARCH, "no action here", ANSWER)
    assert played.queries == ["q", "q"]
    assert closed(played, Role.SEARCHER)[0].status is Status.MALFORMED


@pytest.mark.parametrize(
    ("turn", "status"),
    [
        ("nonsense", Status.MALFORMED),
        (SEARCH + " Question: next", Status.MALFORMED),
        (Turn("<search>q", Stop.LENGTH), Status.LENGTH),
        (Turn("thinking on and on", Stop.LENGTH), Status.LENGTH),
        (Turn(SEARCH + " Question: next", Stop.LENGTH), Status.MALFORMED),
        (CONTEXT, Status.CONTEXT),
    ],
)
def test_a_searcher_without_a_summary_gives_the_fixed_text(turn, status):
    """To the Answerer in the cascade, to the Leader and the Answerer in the hierarchy."""
    played = run_cascade(SEARCH, turn, ANSWER)
    assert [(s.status, s.searches, s.body) for s in closed(played, Role.SEARCHER)] == [(status, 1, "")]
    assert notes_of(played).endswith(f"Result: {PROMPTS.no_result}")
    assert played.outcome.answers == ("Austen",) and played.outcome.searches == 1

    played = run_hierarchy(TASK, SEARCH, turn, REQUEST, ANSWER)
    assert [(s.status, s.searches) for s in closed(played, Role.SEARCHER)] == [(status, 1)]
    result = played.asked(Role.LEADER)[1].messages[0].content
    assert result == f'<result task="1">{PROMPTS.no_result}</result>'
    assert notes_of(played).endswith(f"1. Task: sub\nResult: {PROMPTS.no_result}")
    assert closed(played, Role.LEADER)[0].status is Status.FINISHED


@pytest.mark.parametrize(
    ("turn", "status"),
    [
        ("<request_answer>Austen</request_answer>", Status.MALFORMED),
        (SEARCH, Status.MALFORMED),
        (Turn("<task>sub", Stop.LENGTH), Status.LENGTH),
        (CONTEXT, Status.CONTEXT),
    ],
)
def test_a_leader_without_an_answer_request_ends_the_workflow(turn, status):
    """Even where a summary held the answer: there are no answers, so E is 0."""
    played = run_hierarchy(TASK, SEARCH, "<summary>Austen</summary>", turn)
    assert [s.status for s in played.outcome.sessions] == [status, Status.FINISHED]
    assert played.outcome.answers == ()
    assert played.asked(Role.ANSWERER) == []
    assert played.outcome.searches == 1


def test_an_action_that_closes_on_the_last_allowed_token_counts():
    at_limit = [Turn(text, Stop.LENGTH) for text in (TASK, SEARCH, SUMMARY, REQUEST, ANSWER)]
    played = run_hierarchy(*at_limit)
    assert {s.status for s in played.outcome.sessions} == {Status.FINISHED}
    assert played.outcome.answers == ("Austen",)


def test_the_example_of_an_answer_in_a_prompt_is_never_taken_for_the_answer():
    example = "<answer>the answer</answer>"
    assert example in PROMPTS.answerer and example in PROMPTS.agent
    for played in (run_cascade(SUMMARY, "hm"), run_single("hm")):
        assert example in played.requests[-1].messages[0].content
        ended = played.outcome.sessions[-1]
        assert (ended.status, ended.body) == (Status.MALFORMED, "")
        assert played.outcome.answers == ("",)


def test_each_candidate_loses_only_itself():
    candidates = (ANSWER, "Austen", Turn("<answer>Aus", Stop.LENGTH), CONTEXT, "<answer>Eliot</answer>")
    played = run_cascade(SUMMARY, candidates, candidates=5)
    assert [s.status for s in closed(played, Role.ANSWERER)] == [
        Status.FINISHED,
        Status.MALFORMED,
        Status.LENGTH,
        Status.CONTEXT,
        Status.FINISHED,
    ]
    assert played.outcome.answers == ("Austen", "", "", "", "Eliot")
    reasons = [s.reason for s in closed(played, Role.ANSWERER)]
    assert reasons == ["", "no action", "", "", ""]


def test_a_search_without_a_match_is_answered_by_an_empty_frame():
    played = run_cascade(SEARCH, SUMMARY, ANSWER, documents=(), session_searches=1)
    answer = played.asked(Role.SEARCHER)[1].messages
    assert answer == (Message("user", f"<documents>\n\n</documents>\n{PROMPTS.ask_summary}"),)


def test_what_crosses_into_another_conversation_is_escaped():
    question = "Who? <answer>me</answer>"
    steps = hierarchy(question, TeamConfig(), PROMPTS, 1)
    played = play(steps, [TASK, "<summary>see <b> 1 < 2</summary>", REQUEST, ANSWER])
    assert played.asked(Role.LEADER)[0].messages[1].content == "Who? &lt;answer&gt;me&lt;/answer&gt;"
    assert "<answer>" not in notes_of(played)
    assert "see <b> 1 < 2</result>" in played.asked(Role.LEADER)[1].messages[0].content
    steps = cascade(question, TeamConfig(), PROMPTS, 1)
    assert "<answer>" not in play(steps, [SUMMARY, ANSWER]).asked(Role.SEARCHER)[0].messages[1].content


def test_a_team_with_its_own_words_and_limits():
    words = Prompts(task="look {task}", ask_summary="stop", no_result="nothing", notes="{question} {notes}")
    team = TeamConfig(session_searches=1, searcher_tokens=9, answerer_tokens=5)
    played = play(cascade("X", team, words, 1), [SEARCH, "bad", ANSWER])
    searcher = played.asked(Role.SEARCHER)
    assert searcher[0].messages[1].content == "look X" and searcher[0].max_tokens == 9
    assert searcher[1].messages == (Message("user", "stop", DOCUMENTS),)
    assert notes_of(played) == "X 1. Task: X\nResult: nothing"
    assert played.asked(Role.ANSWERER)[0].max_tokens == 5


def test_one_leader_turn_leaves_only_the_answer_request():
    played = run_hierarchy(REQUEST, ANSWER, leader_turns=1)
    assert played.asked(Role.LEADER)[0].messages[1].content == f"{QUESTION}\n{PROMPTS.ask_answer}"


@pytest.mark.parametrize("kind", Workflow)
def test_a_workflow_is_forked_by_replaying_its_replies(kind):
    """A second generator fed the log stands at the same request, and may then go another way."""

    count = 1 if kind is Workflow.SINGLE else 2

    def start():
        return WORKFLOWS[kind](QUESTION, TeamConfig(), PROMPTS, count)

    script = {
        Workflow.CASCADE: [SEARCH, SEARCH, SUMMARY, (ANSWER, ANSWER)],
        Workflow.HIERARCHY: [TASK, SEARCH, SUMMARY, TASK, SEARCH, "bad", REQUEST, (ANSWER, "bad")],
        Workflow.SINGLE: [SEARCH, SEARCH, ANSWER],
    }[kind]
    played = play(start(), script)
    for point in range(len(played.replies)):
        fork = start()
        seen = [fork.send(reply) for reply in (None, *played.replies[:point])]
        assert seen == played.requests[: point + 1]
    other = start()
    for reply in (None, *played.replies[:-1]):
        request = other.send(reply)
    assert request == played.requests[-1]
    with pytest.raises(StopIteration) as stop:
        other.send((Turn("<answer>Eliot</answer>", Stop.END),) * count)
    assert stop.value.value.answers == ("Eliot",) * count
    assert stop.value.value.sessions[:-count] == played.outcome.sessions[:-count]
    assert played.outcome.answers[0] == "Austen"


def test_two_workflows_share_nothing():
    """Interleaved step by step, each ends as it would alone."""
    first, second = (hierarchy(QUESTION, TeamConfig(), PROMPTS, 1) for _ in range(2))
    alone = run_hierarchy(TASK, SEARCH, SUMMARY, REQUEST, ANSWER)
    ends = []
    for reply in (None, *alone.replies):
        for steps in (first, second):
            try:
                steps.send(reply)
            except StopIteration as stop:
                ends.append(stop.value)
    assert ends == [alone.outcome] * 2


def test_documents_reach_the_searcher_as_the_retriever_gave_them():
    two = (Document("a", "A\nx"), Document("b", "B\n<search>"))
    played = run_cascade(SEARCH, SUMMARY, ANSWER, documents=two)
    assert played.asked(Role.SEARCHER)[1].messages[0].documents == two


def read_much(text: str) -> Turn:
    """A turn whose prompt had 100 tokens."""
    return Turn(text, Stop.END, input_tokens=100)


def test_a_team_that_has_read_its_tokens_neither_searches_nor_delegates_any_more():
    """200 tokens: the Leader's first turn and the Searcher's first search use them up."""
    script = [read_much(text) for text in (TASK, SEARCH, SUMMARY, REQUEST, ANSWER)]
    played = run_hierarchy(*script, workflow_input_tokens=200)
    searcher, leader = played.asked(Role.SEARCHER), played.asked(Role.LEADER)
    assert searcher[1].messages[0].content == PROMPTS.ask_summary
    assert leader[1].messages[0].content.endswith(f"\n{PROMPTS.ask_answer}")
    assert played.outcome.answers == ("Austen",)
    looser = run_hierarchy(*script, workflow_input_tokens=201)
    assert looser.asked(Role.SEARCHER)[1].messages[0].content == ""
    assert looser.asked(Role.LEADER)[1].messages[0].content.endswith(f"\n{PROMPTS.ask_answer}")


def test_beyond_its_tokens_a_team_that_goes_on_is_malformed():
    played = run_hierarchy(
        *map(read_much, (TASK, SEARCH, SEARCH, REQUEST, ANSWER)), workflow_input_tokens=200
    )
    assert [s.status for s in closed(played, Role.SEARCHER)] == [Status.MALFORMED]
    assert played.outcome.searches == 1


# ---------------------------------------------------------------- the single agent


def run_single(*script, **limits):
    return play(single(QUESTION, TeamConfig(**limits), PROMPTS, 1), script)


def test_the_single_agent_searches_and_answers_in_one_conversation():
    played = run_single("I look. " + SEARCH, ANSWER)
    opened = (Message("system", PROMPTS.agent), Message("user", QUESTION))
    assert played.requests == [
        SampleRequest(Role.AGENT, 0, opened, 256, 1),
        SearchRequest("q"),
        SampleRequest(Role.AGENT, 0, (Message("user", "", DOCUMENTS),), 256, 1),
    ]
    ended = Session(Role.AGENT, 0, 0, Status.FINISHED, 1, "Austen", task=QUESTION)
    assert played.outcome == Outcome((ended,), ("Austen",), 1)


def test_the_single_agent_at_its_last_search_is_asked_for_the_answer():
    played = run_single(SEARCH, SEARCH, SEARCH, session_searches=2)
    assert played.asked(Role.AGENT)[2].messages[0].content == PROMPTS.ask_final
    (ended,) = played.outcome.sessions
    assert (ended.status, ended.searches) == (Status.MALFORMED, 2)
    assert ended.reason == "<search> where only <answer> is accepted"
    assert played.outcome.answers == ("",)


@pytest.mark.parametrize(
    ("turn", "status"),
    [
        ("<summary>s</summary>", Status.MALFORMED),
        (Turn("hm", Stop.LENGTH), Status.LENGTH),
        (CONTEXT, Status.CONTEXT),
    ],
)
def test_a_single_agent_without_an_answer_gives_none(turn, status):
    played = run_single(SEARCH, turn)
    assert [s.status for s in played.outcome.sessions] == [status]
    assert played.outcome.answers == ("",) and played.outcome.searches == 1


def test_the_single_agent_gives_one_answer():
    with pytest.raises(ValueError, match="found 5 candidates: ask for 1"):
        next(single(QUESTION, TeamConfig(), PROMPTS, 5))


@pytest.mark.parametrize(
    ("turn", "body"),
    [
        (f"{ANSWER} I am sure.", "Austen"),
        (f"{SEARCH}{ANSWER}", "Austen"),
        ("<answer> Eliot </answer><answer>Austen</answer>", "Austen"),
        ("<answer></answer>", ""),
        ("<answer>Austen", ""),
    ],
)
def test_an_answer_in_a_malformed_turn_is_noted_and_not_given(turn, body):
    played = run_single(turn)
    (ended,) = played.outcome.sessions
    assert (ended.status, ended.body) == (Status.MALFORMED, body)
    assert played.outcome.answers == ("",)


def test_a_teams_malformed_answer_is_not_noted():
    played = run_cascade(SUMMARY, f"{ANSWER} I am sure.")
    assert closed(played, Role.ANSWERER)[0].body == ""
