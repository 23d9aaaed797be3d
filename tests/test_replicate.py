"""tools/replicate in a checkout of its own: refusals, interruptions, the same report again."""

import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from mopd_jax.config import Chain, Config
from mopd_jax.refusal import Refusal
from tests.fixtures import read_metrics
from tests.test_train import ONE_DEVICE, ROOT, measured, wait_for_lines
from tests.tiny_replication import TinyReplication
from tools import replicate

CONFIG = "tests/tiny_replication.py"


def git(checkout: pathlib.Path, *arguments: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", checkout, *author, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> pathlib.Path:
    """The program in a checkout without changes."""
    folder = tmp_path_factory.mktemp("checkout")
    for part in ("mopd_jax", "tools", "configs", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".gitignore").write_text("__pycache__/\nruns/\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "all of it")
    return folder


# ---------------------------------------------------------------- what is refused


def test_a_commit_is_named_only_of_a_checkout_without_changes(tmp_path):
    with pytest.raises(Refusal, match="not a git repository"):
        replicate.clean_commit(tmp_path, "config.py")
    git(tmp_path, "init", "-q")
    (tmp_path / "config.py").touch()
    with pytest.raises(Refusal, match=r"has changes that no commit holds.*\n\?\? config\.py"):
        replicate.clean_commit(tmp_path, str(tmp_path / "config.py"))
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "config")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert replicate.clean_commit(tmp_path, str(tmp_path / "config.py")) == head and len(head) == 40
    with pytest.raises(Refusal, match="A report names the commit of program and config"):
        replicate.clean_commit(tmp_path, str(tmp_path / "elsewhere.py"))
    (tmp_path / "config.py").write_text("changed")
    with pytest.raises(Refusal, match=r"\n M config\.py"):
        replicate.clean_commit(tmp_path, str(tmp_path / "config.py"))


def test_a_replication_goes_on_with_the_commit_that_it_began_with(tmp_path):
    begun = replicate.begin(str(tmp_path), "f00d")
    assert begun["commit"] == "f00d" and begun["machines"] == [replicate.machine()]
    assert replicate.begin(str(tmp_path), "f00d") == begun
    assert json.loads((tmp_path / "replication.json").read_text()) == begun
    with pytest.raises(Refusal, match="begun with commit f00d, the checkout stands at beef"):
        replicate.begin(str(tmp_path), "beef")


def test_what_made_a_finished_replication_stays_the_same(tmp_path, monkeypatch):
    chains = replicate.chains_of(TinyReplication(), ["0", "4"], str(tmp_path))
    for seed, name in itertools.product((0, 4), ("c_mas", "stage1_c_mas", "capped")):
        evaluated = tmp_path / f"seed_{seed}" / name / "evaluated.json"
        evaluated.parent.mkdir(parents=True)
        evaluated.touch()
        os.utime(evaluated, (0, 7200 + 60 * seed + (name == "capped")))
    monkeypatch.setattr(sys, "argv", ["replicate.py", "--config=a b.py", "--seeds=0,4"])
    begun = {"commit": "f00d", "started": 3600.5, "machines": ["one", "other"]}
    assert replicate.made_by(begun, chains) == {
        "commit": "f00d",
        "command": "python -m tools.replicate '--config=a b.py' --seeds=0,4",
        "machine": "one; other",
        "time": "started 1970-01-01 01:00 UTC, last evaluation finished 1970-01-01 02:04 UTC",
    }


def test_every_seed_has_its_folder():
    chains = replicate.chains_of(TinyReplication(), ["3", "0"], "out")
    assert [(chain.run.dir, chain.run.seed) for chain in chains] == [("out/seed_3", 3), ("out/seed_0", 0)]
    assert all(chain.stage1 == TinyReplication().stage1 for chain in chains)


@pytest.mark.parametrize("seeds", [[], ["0", "0"], ["1", "01"], ["1", "-1"], ["a"], [""]])
def test_seeds_are_distinct_whole_numbers(seeds):
    with pytest.raises(Refusal, match=r"expected distinct whole numbers, e\.g\. --seeds=0,1,2"):
        replicate.chains_of(TinyReplication(), seeds, "out")


@pytest.mark.parametrize("config", [Config(), Chain()])
def test_only_a_chain_that_trains_and_evaluates_is_replicated(config):
    with pytest.raises(Refusal, match="takes a chain with phases that reinforce and phases that evaluate"):
        replicate.chains_of(config, ["0"], "out")


# ---------------------------------------------------------------- the program


def start(checkout: pathlib.Path, out: pathlib.Path, seeds: str = "0,1") -> subprocess.Popen:
    """Starts a replication; all of them share their compiled programs."""
    cache = checkout.parent / "compiled"
    return subprocess.Popen(
        [sys.executable, "-m", "tools.replicate", f"--config={CONFIG}", "--seeds", seeds, "--out", str(out)],
        cwd=checkout,
        env=os.environ | {"XLA_FLAGS": ONE_DEVICE, "JAX_COMPILATION_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    return output


def figures(out: pathlib.Path) -> dict[str, bytes]:
    """The files of a report and all results; of the text what no clock and no folder changes."""
    paths = [*(out / "report").iterdir(), *out.glob("*/*/results.jsonl")]
    files = {str(path.relative_to(out)): path.read_bytes() for path in paths}
    report = files["report/report.md"].partition(b"## Made by")[0]
    return files | {"report/report.md": report}


@pytest.fixture(scope="module")
def straight(checkout, tmp_path_factory) -> pathlib.Path:
    """Two seeds, never interrupted."""
    out = tmp_path_factory.mktemp("straight")
    assert f"The report: {out}/report/report.md" in finish(start(checkout, out))
    return out


def test_a_replication_reports_every_system_and_what_made_it(checkout, straight):
    report = (straight / "report" / "report.md").read_text()
    assert "Training seeds: 0, 1.\n" in report and "One seed" not in report
    assert {p.name for p in (straight / "report").iterdir()} == {"report.md", "learning.png", "no_search.png"}
    head, made_by = report.split("## Made by\n\n")
    assert head.index("With session_searches = 3") < head.index("With session_searches = 1")
    assert "| stage1_c_mas − c_mas " in head and "| capped " in head
    commit, command, machine, time = made_by.splitlines()
    assert commit == f"- commit: {git(checkout, 'rev-parse', 'HEAD')}"
    assert command == (f"- command: python -m tools.replicate --config={CONFIG} --seeds 0,1 --out {straight}")
    assert "cores" in machine and "jax" in machine and "UTC, last evaluation finished" in time


def test_seeds_differ_and_systems_of_a_seed_share_their_base(straight):
    crc = {read_metrics(straight / f"seed_{seed}" / "stage1")[0]["episodes_crc32"] for seed in (0, 1)}
    assert len(crc) == 2
    for seed in (0, 1):
        folder = straight / f"seed_{seed}"
        settings = json.loads((folder / "stage1" / "settings.json").read_text())
        evaluated = json.loads((folder / "c_mas" / "evaluated.json").read_text())["config"]
        assert settings["run"]["seed"] == evaluated["run"]["seed"] == seed
        assert settings["model"]["init"] == evaluated["model"]["init"] == str(folder / "base")


def test_interrupted_it_continues_to_the_same_report(checkout, straight, tmp_path):
    """Killed while the second seed trains: the first is skipped, as are phases that are finished."""
    killed = start(checkout, tmp_path)
    wait_for_lines(tmp_path / "seed_1" / "stage1", 1, killed)
    killed.kill()
    killed.communicate()
    assert not (tmp_path / "report").exists()

    output = finish(start(checkout, tmp_path))
    assert f"{tmp_path}/seed_0/stage1 is finished already" in output
    assert f"{tmp_path}/seed_0/capped is evaluated already" in output
    assert f"{tmp_path}/seed_1/base is finished already" in output
    assert figures(tmp_path) == figures(straight) and len(figures(straight)) == 3 + 2 * 3
    for phase in ("seed_0/base", "seed_0/stage1", "seed_1/base", "seed_1/stage1"):
        assert measured(tmp_path / phase) == measured(straight / phase)


def test_a_checkout_with_changes_is_refused_before_anything_is_written(checkout, tmp_path):
    change = checkout / "notes.txt"
    change.touch()
    process = start(checkout, tmp_path / "out")
    output, _ = process.communicate(timeout=900)
    change.unlink()
    assert process.returncode == 2 and "Traceback" not in output
    assert "?? notes.txt" in output and not (tmp_path / "out").exists()


def test_interrupted_in_an_evaluation_it_continues_to_the_same_report(checkout, straight):
    """As if killed while the results were written; the last test here, for it changes the finished run."""
    whole = figures(straight)
    evaluation = straight / "seed_1" / "stage1_c_mas"
    (evaluation / "evaluated.json").unlink()
    results = (evaluation / "results.jsonl").read_bytes()
    (evaluation / "results.jsonl").write_bytes(results[: len(results) // 2])
    shutil.rmtree(straight / "report")

    output = finish(start(checkout, straight))
    assert f"{straight}/seed_1/c_mas is evaluated already" in output
    assert f"{evaluation} is evaluated already" not in output
    assert figures(straight) == whole
