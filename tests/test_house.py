"""The habits of the house, read from the sources: who imports whom, what is read, what is documented."""

import ast
import dataclasses
import pathlib
from collections.abc import Iterator

import pytest

from mopd_jax.config import ArchitectureConfig, Config

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mopd_jax"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "tools").rglob("*.py"), *(ROOT / "configs").rglob("*.py")])

ROOMS = ("config", "retrieval", "team", "data", "model", "rollout", "learn", "run", "programs")
"""From left to right: a room imports itself and what stands to its left."""
FRONT = {"config", "choices", "checks", "objective_rules", "flags", "published", "refusal"}
"""Modules of the package itself that stand leftmost; the others are programs."""
FOREIGN = {
    "team": {"jax", "flax", "optax", "orbax", "transformers", "tokenizers", "torch", "tensorflow_datasets"},
    "data": {"jax", "flax", "optax", "orbax", "torch"},
}
"""What a room must not import at all."""
NARROW = {
    "learn": {
        "team": {"mopd_jax.team.episode"},
        "data": {"mopd_jax.data.answers"},
        "retrieval": set(),
        "rollout": set(),
    },
    "model": {"team": {"mopd_jax.team.episode"}, "retrieval": {"mopd_jax.retrieval.search"}},
}
"""Rooms of which another may import only these modules."""
NEVER_READ = {"rollout.temperature", "rollout.top_p", "rollout.top_k"}
"""Fields with one legal value; `checks.py` refuses the others, so nobody needs to read them."""
OBVIOUS = {"main", "get_config", "setup"}
"""Names that a library or every program gives."""

TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def named(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


# ---------------------------------------------------------------- rooms


def room_of(module: str) -> str:
    """The room of a module of ours, e.g. "learn" of mopd_jax.learn.loss."""
    top, _, inside = module.partition(".")
    if top != "mopd_jax":
        return "programs" if top == "tools" else "config"  # configs/ hold nothing but a config
    first = inside.split(".")[0]
    if not first or first in FRONT:
        return "config"
    return first if (PACKAGE / first).is_dir() else "programs"


def module_of(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.Module) -> Iterator[str]:
    """Every imported module, those inside functions included; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def existing_module(name: str) -> str:
    """Cuts a name off that is no module: mopd_jax.config.Config → mopd_jax.config."""
    path = ROOT / name.replace(".", "/")
    return name if path.is_dir() or path.with_suffix(".py").is_file() else name.rpartition(".")[0]


def complaints(module: str, tree: ast.Module) -> Iterator[str]:
    room = room_of(module)
    for name in imports(tree):
        top = name.split(".")[0]
        if top in FOREIGN.get(room, ()):
            yield f"{module} imports {name}: {room} does without {top}"
        if top not in ("mopd_jax", "tools"):
            continue
        other = existing_module(name)
        if ROOMS.index(room_of(other)) > ROOMS.index(room):
            yield f"{module} imports {other}: {room} stands left of {room_of(other)}"
        allowed = NARROW.get(room, {}).get(room_of(other))
        if allowed is not None and other not in allowed:
            yield f"{module} imports {other}: {room} may import of {room_of(other)} only {sorted(allowed)}"


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_a_room_imports_only_rooms_to_its_left(path):
    assert list(complaints(module_of(path), TREES[path])) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("mopd_jax.team.roles", "import mopd_jax.learn.loss", "team stands left of learn"),
        ("mopd_jax.config", "from mopd_jax.team import roles", "config stands left of team"),
        ("mopd_jax.run.report", "from mopd_jax import train", "run stands left of programs"),
        ("mopd_jax.team.roles", "def f():\n    import jax.numpy as jnp", "team does without jax"),
        ("mopd_jax.learn.loss", "from mopd_jax.team.workflows import cascade", "may import of team only"),
        ("mopd_jax.learn.loss", "from mopd_jax.team.episode import Row", None),
        ("mopd_jax.train", "from mopd_jax.run import metrics", None),
        ("tools.benchmark", "from mopd_jax.train import train", None),
        ("configs.mini", "from mopd_jax.config import Config", None),
        ("configs.mini", "from mopd_jax.data import miniature", "config stands left of data"),
    ],
)
def test_the_rule_finds_offenders(module, source, complaint):
    found = list(complaints(module, ast.parse(source)))
    assert len(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]


# ---------------------------------------------------------------- config fields


def fields_of(group: type, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yields (dotted field, name of its group, its own name) of every leaf."""
    for f in dataclasses.fields(group):
        if dataclasses.is_dataclass(f.type):
            yield from fields_of(f.type, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, prefix.split(".")[-2], f.name


def terminal(node: ast.expr) -> str:
    """`c.optim` and `self._optim` and `optim` are all called optim; "" for what has no name."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_")


def aliases(trees: list[ast.Module]) -> dict[str, set[str]]:
    """Names under which each group is known: its own, annotated parameters, plain assignments."""
    groups = {f.name: f.type.__name__ for f in dataclasses.fields(Config)}
    groups["architecture"] = ArchitectureConfig.__name__
    known = {group: {group} for group in groups}
    by_class = {class_name: known[group] for group, class_name in groups.items()}
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name):
            by_class.get(node.annotation.id, set()).add(node.arg.lstrip("_"))
        elif isinstance(node, ast.Assign):
            for target, value in pairs(node):
                if isinstance(value, ast.Attribute):
                    known.get(terminal(value), set()).add(target)
    return known


def pairs(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    """`a, b = x, y` gives (a, x), (b, y)."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from ((terminal(t), v) for t, v in zip(target.elts, node.value.elts, strict=True))
        else:
            yield terminal(target), node.value


def reads(trees: list[ast.Module]) -> Iterator[tuple[str, str]]:
    """Yields (group, field) of every attribute that is read; `vars(group)` reads them all: "*"."""
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield terminal(node.value), node.attr
        elif isinstance(node, ast.Call) and terminal(node.func) == "vars" and node.args:
            yield terminal(node.args[0]), "*"


def unread_fields(trees: list[ast.Module]) -> list[str]:
    known, read = aliases(trees), set(reads(trees))
    return [
        dotted
        for dotted, group, name in fields_of(Config, "config.")
        if not any((alias, what) in read for alias in known[group] for what in (name, "*"))
    ]


def test_every_config_field_is_read():
    """`checks.py` refuses values and `flags.py` prints them: that is not reading."""
    readers = [
        TREES[path]
        for path in SOURCES
        if path.is_relative_to(PACKAGE) and room_of(module_of(path)) != "config"
    ]
    unread = {dotted.removeprefix("config.") for dotted in unread_fields(readers)}
    assert sorted(unread - NEVER_READ) == []


def test_an_unread_field_is_found():
    source = """
def f(config: Config, limits: TeamConfig):
    a, learn = config.model.architecture, config.learn
    config.train.steps = 3  # writing is not reading
    other.questions
    vars(config.mesh)
    return config.optim.lr, limits.leader_turns, a.hidden_size, learn.beta, self._optim.b1
"""
    unread = unread_fields([ast.parse(source)])
    total = len(list(fields_of(Config, "config.")))
    assert total - len(unread) == 7
    for name in ("optim.lr", "optim.b1", "team.leader_turns", "model.architecture.hidden_size", "learn.beta"):
        assert f"config.{name}" not in unread
    assert {"config.train.steps", "config.train.questions", "config.eval.questions"} <= set(unread)


# ---------------------------------------------------------------- words and sizes


def definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes of a module, and the public methods of those classes."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    public = [n for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]
    yield from public
    for node in public:
        if isinstance(node, ast.ClassDef):
            yield from (n for n in node.body if isinstance(n, kinds) and not n.name.startswith("_"))


def undocumented(tree: ast.Module) -> list[str]:
    """A name is documented once in its module: at the protocol, not again at what implements it."""
    found = list(definitions(tree))
    documented = {node.name for node in found if ast.get_docstring(node)} | OBVIOUS
    missing = [node.name for node in found if node.name not in documented]
    return missing if ast.get_docstring(tree) or not tree.body else ["the module", *missing]


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_what_is_public_has_a_docstring(path):
    groups = {f.type.__name__ for f in dataclasses.fields(Config)}  # their fields are documented one by one
    assert [name for name in undocumented(TREES[path]) if name not in groups] == []


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_files_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 450


def test_every_config_field_has_a_docstring():
    """The text below a field is its docstring; `--help` and readers live on it."""
    bare = []
    for group in (n for n in TREES[PACKAGE / "config.py"].body if isinstance(n, ast.ClassDef)):
        for field, below in zip(group.body, [*group.body[1:], None], strict=True):
            documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and group.name not in ("Config", "Chain") and not documented:
                bare.append(f"{group.name}.{field.target.id}")
    assert bare == []
