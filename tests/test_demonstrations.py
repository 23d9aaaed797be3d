"""The warm-up's conversations: files with awkward lines, and the order in which they are drawn."""

import json

import pytest

from mopd_jax.data.demonstrations import Conversation, FileDemonstrations, read_conversations
from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.search import Document
from mopd_jax.team.episode import Message, Role

SEARCH = {
    "role": "searcher",
    "messages": [
        {"role": "system", "content": "Find it."},
        {"role": "user", "content": "Task: capital of France"},
        {"role": "assistant", "content": "<search>France</search>"},
        {"role": "user", "content": "", "documents": [{"id": "7", "contents": '"France"\nParis is …'}]},
        {"role": "assistant", "content": "<summary>Paris</summary>"},
    ],
}
ANSWER = {
    "role": "answerer",
    "messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "<answer>é</answer>"}],
}


def write(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return path


def with_documents(documents):
    return {**ANSWER, "messages": [{**ANSWER["messages"][0], "documents": documents}, ANSWER["messages"][1]]}


def numbered(count):
    return [Conversation(Role.ANSWERER, (Message("user", "q"), str(i))) for i in range(count)]


def drawn(source, step, count):
    return [int(conversation.messages[-1]) for conversation in source.batch(step, count)]


def test_reads_turns_and_environment_messages(tmp_path):
    first, second = read_conversations(write(tmp_path / "d.jsonl", SEARCH, "", ANSWER))
    assert first == Conversation(
        Role.SEARCHER,
        (
            Message("system", "Find it."),
            Message("user", "Task: capital of France"),
            "<search>France</search>",
            Message("user", "", (Document("7", '"France"\nParis is …'),)),
            "<summary>Paris</summary>",
        ),
    )
    assert second == Conversation(Role.ANSWERER, (Message("user", "Who?"), "<answer>é</answer>"))


def test_line_ends_and_byte_order_mark_are_no_content(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{json.dumps(ANSWER)}\r\n{json.dumps(SEARCH)}\r\n".encode())
    assert [c.role for c in read_conversations(path)] == [Role.ANSWERER, Role.SEARCHER]


def test_a_line_separator_inside_a_text_does_not_end_its_line(tmp_path):
    record = json.loads(json.dumps(ANSWER))
    record["messages"][0]["content"] = "a\u2028b\u0085c"
    path = write(tmp_path / "d.jsonl", json.dumps(record, ensure_ascii=False))
    assert read_conversations(path)[0].messages[0].content == "a\u2028b\u0085c"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("{", ["not JSON", "one JSON object per line"]),
        ("[1]", ["a JSON list"]),
        ({"messages": []}, ["['messages']", "'role'"]),
        ({**ANSWER, "note": 1}, ["'note'", "'messages'"]),
        ({**ANSWER, "role": "critic"}, ["'critic'", "'leader', 'searcher', 'answerer'"]),
        ({**ANSWER, "role": None}, ["None", "'leader'"]),
        ({**ANSWER, "messages": "hello"}, ['"hello"', "list"]),
        ({**ANSWER, "messages": []}, ["[]", "assistant last"]),
        ({**ANSWER, "messages": ANSWER["messages"][:1]}, ["['user']", "assistant last"]),
        ({**ANSWER, "messages": ANSWER["messages"][1:]}, ["['assistant']", "user and assistant by turns"]),
        ({**ANSWER, "messages": [*ANSWER["messages"], ANSWER["messages"][1]]}, ["by turns"]),
        (
            {**ANSWER, "messages": [ANSWER["messages"][0], {"role": "assistant", "content": None}]},
            ["null", "text as content"],
        ),
        (
            {**ANSWER, "messages": [ANSWER["messages"][0], {"role": "assistant", "text": "a"}]},
            ['"text"', "['content', 'role']"],
        ),
        (
            {
                **ANSWER,
                "messages": [
                    {"role": "user", "content": "", "documents": [{"id": 1}]},
                    ANSWER["messages"][1],
                ],
            },
            ['[{"id": 1}]', '{"id", "contents"}'],
        ),
        (with_documents(5), ["found documents 5", '{"id", "contents"}']),
        (with_documents({"id": "1", "contents": "t"}), ["found documents {", "expected [{"]),
        (with_documents([{"id": "1", "contents": None}]), ['"contents" is None']),
        (with_documents([{"id": None, "contents": "t"}]), ['"id" is None']),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path, record, words):
    path = write(tmp_path / "d.jsonl", ANSWER, "", record)
    with pytest.raises(ValueError) as error:
        read_conversations(path)
    assert f"{path}, line 3: " in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_another_encoding_and_a_missing_file_are_refused(tmp_path):
    path = tmp_path / "d.jsonl"
    with pytest.raises(Refusal, match=r"Found no file .*d\.jsonl"):
        read_conversations(path)
    path.write_text(json.dumps(ANSWER), encoding="utf-16")
    with pytest.raises(Refusal, match=r"d\.jsonl, line 1: not JSON"):
        read_conversations(path)


def test_each_epoch_holds_every_conversation_once_in_another_order():
    source = FileDemonstrations(numbered(10), seed=0)
    epochs = [[i for step in range(5 * e, 5 * e + 5) for i in drawn(source, step, 2)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_batch_may_span_epochs():
    source = FileDemonstrations(numbered(5), seed=3)
    taken = [i for step in range(5) for i in drawn(source, step, 7)]
    for epoch in range(7):
        assert sorted(taken[5 * epoch : 5 * epoch + 5]) == list(range(5))


def test_a_batch_depends_on_step_and_seed_alone():
    source = FileDemonstrations(numbered(50), seed=1)
    straight = [drawn(source, step, 8) for step in range(9)]
    assert drawn(FileDemonstrations(numbered(50), seed=1), 8, 8) == straight[8]
    assert drawn(FileDemonstrations(numbered(50), seed=2), 8, 8) != straight[8]


def test_no_conversation_at_all_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        FileDemonstrations([], seed=0)
