"""The shape of the package: which room may know which, and that rooms stay small and say what they offer."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "outrider"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60

# Imports go to the same layer or to one above it in this list, never down. A new room gets its line here.
LAYERS = (
    ("errors", "config", "outputs", "sequence", "proposal", "sampling"),
    ("model", "kernels", "verify"),
    ("draft",),
    ("engine",),
    (
        "llm",
        "setup",
        "wrapping",
        "progress",
        "drafters",
        "draft_models",
        "samples",
        "prompts",
        "config_file",
        "garbage",
    ),
    ("bench", "proof", "server", "advice"),
    ("tune",),
    ("cli",),
)
RANKS = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}
FACADE = "outrider/__init__.py"  # gives users the names of every layer
STRANGERS = {"model": {"verify"}, "verify": {"model"}, "kernels": {"model", "verify"}}

MODELLING_MODULES = (
    "transformers.cache_utils",
    "transformers.generation",
    "transformers.integrations",
    "transformers.masking_utils",
    "transformers.modeling_",
    "transformers.models",
    "transformers.pytorch_utils",
)
MODELLING_NAMES = ("AttentionInterface", "AutoModel", "Cache", "DynamicCache", "StaticCache")


@dataclass(frozen=True)
class Import:
    """One imported module, or one name from it, as ``from module import name`` may mean either."""

    module: str
    name: str
    line: int
    for_types: bool

    @property
    def full(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def title(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, *, for_types: bool = False) -> list[Import]:
    """Every import, those inside functions and ``if TYPE_CHECKING`` included."""
    found: list[Import] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, "", node.lineno, for_types) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [Import(module, alias.name, node.lineno, for_types) for alias in node.names]
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            found += imports(ast.Module(node.body, []), for_types=True)
            found += imports(ast.Module(node.orelse, []), for_types=for_types)
        else:
            found += imports(node, for_types=for_types)
    return found


def rooms_imported(tree: ast.AST) -> list[tuple[str, int]]:
    """The rooms of this package that a module imports from, with the lines; names of the facade are no rooms."""
    ours = [(one.full.split("."), one.line) for one in imports(tree) if one.full.startswith("outrider.")]
    return [(parts[1], line) for parts, line in ours if parts[1] in RANKS]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def defined(tree: ast.Module) -> set[str]:
    """Names bound at the top of a module, under ``if`` and ``try`` too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def public_definitions(tree: ast.Module) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


every_file = pytest.mark.parametrize("path", FILES, ids=title)


def test_every_room_has_its_layer() -> None:
    rooms = {room(path) for path in FILES if title(path) != FACADE} - {"__main__"}
    assert rooms <= set(RANKS), "a new room: give it a line in LAYERS"


@every_file
def test_imports_go_one_way(path: Path) -> None:
    if title(path) == FACADE or path.name == "__main__.py":  # what starts a program knows all of it
        return
    here = room(path)
    wrong = [
        f"line {line}: {here} imports {there}"
        for there, line in rooms_imported(parsed(path))
        if RANKS[there] > RANKS[here] or there in STRANGERS.get(here, ())
    ]
    assert not wrong


@every_file
def test_imports_are_absolute(path: Path) -> None:
    assert not [one.line for one in imports(parsed(path)) if one.module.startswith(".")]


@every_file
def test_only_model_knows_modelling_code(path: Path) -> None:
    if room(path) == "model":
        return
    wrong = [
        f"line {one.line}: {one.full}"
        for one in imports(parsed(path))
        if not one.for_types
        and (
            one.full.startswith(MODELLING_MODULES)
            or (one.module == "transformers" and one.name.startswith(MODELLING_NAMES))
            or one.name.endswith("ForCausalLM")
        )
    ]
    assert not wrong


@every_file
def test_names_say_what_is_inside(path: Path) -> None:
    assert path.stem not in {"utils", "util", "helpers", "common", "misc"}
    classes = [node.name for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]
    assert not [name for name in classes if name.startswith("Base")]


@every_file
def test_all_lists_what_is_offered(path: Path) -> None:
    tree = parsed(path)
    names = exported(tree)
    if names is None:
        assert not public_definitions(tree), "public definitions, but no __all__"
        return
    assert len(names) == len(set(names))
    assert set(names) <= defined(tree), "__all__ names what is not there"


@every_file
def test_files_and_functions_stay_small(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = [node for node in ast.walk(parsed(path)) if isinstance(node, kinds)]
    sizes = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert not {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import outrider.engine.round", "engine"),
        ("from outrider.engine import round", "engine"),
        ("from outrider import engine", "engine"),
        ("def f():\n    from outrider.engine.round import propose", "engine"),
        ("if TYPE_CHECKING:\n    from outrider.engine.engine import Engine", "engine"),
        ("try:\n    import outrider.engine\nexcept ImportError:\n    pass", "engine"),
    ],
)
def test_no_spelling_of_an_import_is_missed(source: str, expected: str) -> None:
    assert [there for there, _ in rooms_imported(ast.parse(source))] == [expected]
