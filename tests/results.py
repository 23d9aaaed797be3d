"""Results written by hand: records, and whole results from a table of exact matches."""

from mopd_jax.run.results import Conditions, Record, Result

CONDITIONS = Conditions("f00d", "bm25:7df1", {"k": 3, "session_searches": 4})


def make_record(dataset: str = "nq", id: str = "0", attempt: int = 0, em: float = 0.0, **fields) -> Record:
    """Returns a record whose F1, containment and recall are its exact match unless `fields` say otherwise."""
    defaults = {
        "split": "test", "answer": "x", "f1": em, "containment": em, "recall": em, "searches": 2,
        "calls": 4, "input_tokens": 100, "output_tokens": 10, "aborted": False,
        "rows": {"searcher": {"finished": 1}},
    }  # fmt: skip
    return Record(dataset=dataset, id=id, attempt=attempt, em=em, **defaults | fields)


def make_result(
    scores: dict[str, list[list[float]]], system: str = "ours", seed: int = 0, **fields
) -> Result:
    """Returns a result from dataset → exact match per question and attempt."""
    records = [
        make_record(dataset, str(q), a, em, **fields)
        for dataset, questions in scores.items()
        for q, attempts in enumerate(questions)
        for a, em in enumerate(attempts)
    ]
    return Result(system, seed, CONDITIONS, tuple(records))
