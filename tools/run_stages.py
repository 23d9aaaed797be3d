"""Warm-up, stage 1, stage 2 and their evaluations on your own files, one after the other.

    python -m tools.run_stages --model checkpoints/small --corpus corpus.jsonl \\
        --train nq_train.jsonl --train hotpotqa_train.jsonl --test nq.jsonl --out runs/real

Demonstrations are made from the training questions and the corpus; then `configs/warmup.py`,
`configs/stage1.py` and `configs/stage2.py` run with overrides only, each command printed before it
starts. The defaults suit a small checkpoint on a laptop's CPU. Everything after `--` overrides a field
in every phase, e.g. `-- --config.optim.lr=1e-4`. What does not fit is refused before anything starts. A
broken run goes on when the same command is given again; demonstrations are made anew where their inputs
changed.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from etils import epath

from mopd_jax import flags
from mopd_jax.checks import lines, refuse
from mopd_jax.config import Kind
from mopd_jax.refusal import in_words
from mopd_jax.run import parts, preflight
from mopd_jax.run.checkpoint import read_json, write_json
from mopd_jax.run.report import format_report
from mopd_jax.run.results import Result, read_result
from mopd_jax.team.episode import Status

LAPTOP = (
    "--config.mesh.shape=(1,1,1)",
    "--config.mesh.rollout_tensor=1",
    "--config.model.compute=float32",
    "--config.model.frozen=float32",
    "--config.model.rollout=float32",
    "--config.model.remat=minimal",
    "--config.model.attention=xla",
    "--config.retrieval.backend=bm25",
    "--config.team.row_tokens=1536",
    "--config.team.document_tokens=256",
    "--config.team.session_searches=2",
    "--config.team.leader_turns=3",
    "--config.team.leader_tokens=96",
    "--config.team.searcher_tokens=96",
    "--config.team.answerer_tokens=32",
    "--config.rollout.conversations=16",
    "--config.rollout.parked=16",
    "--config.rollout.requests=4",
    "--config.rollout.prefill_tokens=128",
    "--config.learn.row_buckets=(768,1024,1536)",
    "--config.learn.micro_batch_tokens=6144",
    "--config.learn.logit_chunk=256",
    "--config.learn.role_gradients_every=0",
    "--config.eval.every=0",
    "--config.optim.warmup_steps=0",
)
"""What makes the full-scale experiments fit two CPU cores and a model of a few million parameters."""

MAKE, TRAIN, EVALUATE = "tools.make_demonstrations", "mopd_jax.train", "mopd_jax.evaluate"
DEMONSTRATIONS, MADE_FROM = "demonstrations.jsonl", "demonstrations.json"
"""Files in --out: the conversations, and the fingerprints of what they were made from."""

INVALID = (Status.MALFORMED.value, Status.LENGTH.value)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` defaults to the process' own arguments."""
    args = _parse(argv)
    out = epath.Path(args.out)
    make, *phases = commands(args)
    check(phases, made=str(out / DEMONSTRATIONS))
    out.mkdir(parents=True, exist_ok=True)
    if not up_to_date(args):
        run(make)
        write_json(out / MADE_FROM, _inputs(args))
    for command in phases:
        run(command)
    results = [replace(read_result(out / name / "results.jsonl"), system=name) for name in SYSTEMS]
    print("\n" + format_report(results))
    for result in results:
        print(f"{result.system}: {100 * valid_turns(result):.1f} % of the turns were valid")


def check(phases: Sequence[Sequence[str]], made: str) -> None:
    """Loads the configs of all commands and looks for the files they read.

    Args:
      phases: commands that train or evaluate, in order; a model may be the folder of an earlier one.
      made: file that will have been made by then.

    Raises:
      ConfigError: what is wrong or missing.
    """
    problems, there = {}, {made}
    for module, *arguments in phases:
        config = flags.load(arguments, Kind.EVALUATE if module == EVALUATE else None)
        kind = Kind.EVALUATE if module == EVALUATE else config.train.kind
        findings = preflight.missing_inputs(config, kind, there)
        problems |= dict.fromkeys(lines(config, "config", findings))  # each once, in order
        there.add(config.run.dir)
    refuse(list(problems))


def run(command: Sequence[str]) -> None:
    """Prints and runs a module with its arguments; ends with its exit code if it fails, its words above."""
    print("\n+", " ".join(command), flush=True)
    if code := subprocess.run([sys.executable, "-m", *command]).returncode:
        sys.exit(code)


def up_to_date(args: argparse.Namespace) -> bool:
    """Returns whether the demonstrations that are there were made from these questions and passages."""
    out = epath.Path(args.out)
    return (out / DEMONSTRATIONS).exists() and read_json(out / MADE_FROM) == _inputs(args)


def _inputs(args: argparse.Namespace) -> dict[str, str]:
    return {path: parts.file_fingerprint(path) for path in (args.corpus, *args.train)}


SYSTEMS = {
    "before_warmup": ("warmup", "cascade"),
    "after_warmup": ("warmup", "cascade"),
    "stage1_c_mas": ("stage1", "cascade"),
    "stage2_h_mas": ("stage2", "hierarchy"),
}
"""Evaluation → the experiment whose config it takes, and its workflow."""


def commands(args: argparse.Namespace) -> list[list[str]]:
    """Returns the modules to run with their arguments, in order, the maker of demonstrations first."""
    out = epath.Path(args.out)
    demonstrations = str(out / DEMONSTRATIONS)
    common = [
        *LAPTOP,
        f"--config.retrieval.corpus={args.corpus}",
        f"--config.run.seed={args.seed}",
        *args.overrides,
    ]
    data = [
        f"--config.data.train={_tuple(args.train)}",
        f"--config.data.test={_tuple(args.test)}",
        "--config.data.manifest=",
    ]
    small = [f"--config.train.questions={args.questions}", f"--config.train.steps={args.steps}"]

    def train(experiment: str, *extra: str) -> list[str]:
        where = [f"--config=configs/{experiment}.py", f"--config.run.dir={out / experiment}"]
        return [TRAIN, *where, *common, *data, *extra]

    def evaluate(name: str, model: str) -> list[str]:
        experiment, workflow = SYSTEMS[name]
        return [
            EVALUATE,
            f"--config=configs/{experiment}.py",
            f"--config.run.dir={out / name}",
            *common,
            *data,
            f"--config.model.init={model}",
            f"--config.team.workflow={workflow}",
            f"--config.eval.questions={args.eval_questions}",
            f"--config.eval.attempts={args.attempts}",
        ]

    warm = str(out / "warmup")
    questions = [part for path in args.train for part in ("--questions", path)]
    return [
        [MAKE, *questions, "--corpus", args.corpus, "--out", demonstrations],
        evaluate("before_warmup", args.model),
        train(
            "warmup",
            f"--config.model.init={args.model}",
            f"--config.data.demonstrations={_tuple([demonstrations])}",
            f"--config.train.steps={args.warmup_steps}",
            f"--config.train.questions={args.warmup_batch}",
            f"--config.optim.lr={args.warmup_lr}",
        ),
        evaluate("after_warmup", warm),
        train("stage1", f"--config.model.init={warm}", f"--config.model.reference={warm}", *small),
        evaluate("stage1_c_mas", str(out / "stage1")),
        train(
            "stage2",
            f"--config.model.init={warm}",
            f"--config.model.teacher={out / 'stage1'}",
            f"--config.model.reference={out / 'stage1'}",
            *small,
        ),
        evaluate("stage2_h_mas", str(out / "stage2")),
    ]


def valid_turns(result: Result) -> float:
    """Returns the share of sampled turns with one well-formed action: an ill-formed one ends its row."""
    calls = sum(record.calls for record in result.records)
    invalid = sum(
        count
        for record in result.records
        for statuses in record.rows.values()
        for status, count in statuses.items()
        if status in INVALID
    )
    return 1 - invalid / calls if calls else 0.0


def _tuple(paths: Sequence[str]) -> str:
    return "(" + "".join(f"{path!r}," for path in paths) + ")"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder of a Qwen3 checkpoint")
    add("--corpus", required=True, help='passages, {"id", "contents"} JSONL')
    add("--train", action="append", required=True, help="training questions; may be given several times")
    add("--test", action="append", required=True, help="test questions; may be given several times")
    add("--out", required=True, help="folder of everything that is written")
    add("--warmup_steps", type=int, default=150)
    add("--warmup_batch", type=int, default=16, help="conversations per step of the warm-up")
    add("--warmup_lr", type=float, default=2e-3)
    add("--steps", type=int, default=3, help="steps of stage 1 and of stage 2")
    add("--questions", type=int, default=4, help="questions per step of stage 1 and stage 2")
    add(
        "--eval_questions",
        type=int,
        default=28,
        help="test questions, spread evenly over the data sets; 0: all",
    )
    add("--attempts", type=int, default=4, help="attempts per test question")
    add("--seed", type=int, default=0)
    add("overrides", nargs="*", help="after `--`: --config.group.field=value, for every phase")
    return parser.parse_args(argv)


if __name__ == "__main__":
    with in_words():
        main()
