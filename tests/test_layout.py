"""The shape of the repository: who may import whom, where each hazard lives, how long a file may be."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import jupytext
import pytest

import gbfunc as gb

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gbfunc"

# Lowest first; a room (a module or a subpackage) imports only from itself and from the rows above its own.
LEVELS = (
    {"types", "costs", "extras"},
    {"trees", "tiling", "encoding", "files", "untrusted"},
    {"hypernets", "formats"},
    {"layers"},
    {"base"},
    {"pnet"},
    {"plan"},
    {"genome"},
    {"parallel"},
    {"generation"},
    {"grown"},
    {"train", "many", "fit"},
    {"storage"},
    {"module"},
    {"exporting"},
    {"__init__"},
    {"tasks", "plots"},
    {"lab", "federated", "evolution"},
    {"cli"},
    {"__main__"},
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
TOP_LEVEL = {"gbfunc", "tests", "notebooks", "pyproject.toml", "README.md", "LICENSE"}
MAX_LINES = 450
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))
TESTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py"))
NOTEBOOKS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb"))


def room_of(path: str) -> str:
    return Path(path).parts[1].removesuffix(".py")


def parse(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=path)


def imported_modules(tree: ast.AST, path: str) -> Iterator[str]:
    """Full dotted names of all that a file imports, `from a import b` as `a.b`, relative imports resolved."""
    package = Path(path).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            parts = [*base, *(node.module.split(".") if node.module else ())]
            yield from (".".join([*parts, alias.name]) for alias in node.names)


def imported_rooms(tree: ast.AST, path: str) -> set[str]:
    rooms = set()
    for module in imported_modules(tree, path):
        package, *rest = module.split(".")
        if package == "gbfunc":
            rooms.add(rest[0] if rest and rest[0] in LEVEL else "__init__")
    return rooms


def upward_imports(tree: ast.AST, path: str) -> set[str]:
    own = room_of(path)
    return {room for room in imported_rooms(tree, path) - {own} if LEVEL[room] >= LEVEL[own]}


def without_type_checking(tree: ast.Module) -> ast.Module:
    class Strip(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            self.generic_visit(node)
            return node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else node

    return Strip().visit(tree)


def uses_distributed(tree: ast.Module, path: str) -> bool:
    tree = without_type_checking(tree)
    dotted = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = dotted | set(imported_modules(tree, path))
    return any(f"{name}.".startswith("torch.distributed.") for name in names)


def test_every_file_has_a_level() -> None:
    strangers = {path for path in SOURCES if room_of(path) not in LEVEL}
    assert not strangers, "give each a place in LEVELS and in the design's table"


def test_imports_come_from_lower_levels() -> None:
    placed = [path for path in SOURCES if room_of(path) in LEVEL]
    upward = {path: upward_imports(parse(path), path) for path in placed}
    assert {path: rooms for path, rooms in upward.items() if rooms} == {}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_files(tree: ast.AST, path: str, files: dict[str, str], sources: dict[str, ast.AST]) -> set[str]:
    """Files that a file imports: those of modules, and the `__init__` that a name is taken from.

    Within a package, a name that is taken from its `__init__` stands for the file that this takes it from.
    """
    found = set()
    for module in imported_modules(tree, path):
        name = module
        while name not in files and "." in name:
            name = name.rpartition(".")[0]
        if name not in files:
            continue
        inside = name != "gbfunc" and f"{module_of(path)}.".startswith(f"{name}.") and path != files[name]
        if inside and name != module:
            attribute = module.removeprefix(f"{name}.").split(".")[0]
            origins = [m for m in imported_modules(sources[name], files[name]) if m.endswith(f".{attribute}")]
            name = next((m.rpartition(".")[0] for m in origins if m.rpartition(".")[0] in files), name)
        found.add(files[name])
    return found - {path}


def test_no_files_import_each_other() -> None:
    trees: dict[str, ast.AST] = {path: parse(path) for path in SOURCES}
    files, sources = {module_of(path): path for path in trees}, {module_of(path): t for path, t in trees.items()}
    graph = {path: imported_files(tree, path, files, sources) for path, tree in trees.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_only_parallel_uses_torch_distributed() -> None:
    users = {path for path in SOURCES if uses_distributed(parse(path), path)}
    assert {room_of(path) for path in users} == {"parallel"}


def test_only_pnet_calls_the_pnet_functionally() -> None:
    named = (ast.Name, ast.Attribute, ast.alias)
    nodes = {path: [node for node in ast.walk(parse(path)) if isinstance(node, named)] for path in SOURCES}
    callers = {path for path, found in nodes.items() if any("functional_call" in ast.unparse(x) for x in found)}
    # A g-net made of a module is called so too, in one more place.
    assert callers <= {"gbfunc/pnet/pure.py", "gbfunc/hypernets/module.py"}


def test_only_the_cli_prints() -> None:
    calls = {path: [x for x in ast.walk(parse(path)) if isinstance(x, ast.Call)] for path in SOURCES}
    printing = {path for path, found in calls.items() if any(ast.unparse(call.func) == "print" for call in found)}
    assert {room_of(path) for path in printing} <= {"cli"}


def test_files_are_short() -> None:
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in SOURCES + TESTS}
    assert {path: n for path, n in lines.items() if n > MAX_LINES} == {}


def test_top_level_holds_the_agreed_names_and_dot_folders() -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)

    try:
        top = git("rev-parse", "--show-toplevel")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if top.returncode or Path(top.stdout.strip()).resolve() != ROOT:
        pytest.skip("the tree is not a git checkout")
    files = git("ls-files").stdout.splitlines()
    names = {file.split("/")[0] for file in files if (ROOT / file).exists()}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_equals_its_script(path: str) -> None:
    def cells(file: Path) -> list[tuple[str, str]]:
        return [(cell.cell_type, cell.source) for cell in jupytext.read(file).cells]

    notebook = ROOT / path
    assert cells(notebook) == cells(notebook.with_suffix(".py")), f"run `jupytext --sync {path}`"


@pytest.mark.parametrize("page", sorted([ROOT / "README.md", *ROOT.glob("notebooks/*/*.md")]), ids=lambda p: p.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    # Pages in which a genome grows are written from it when the site is built.
    grown = {f"../pages/{genome.stem}.html" for genome in ROOT.glob("notebooks/pages/*.genome")}
    links = [link for link in links if link.replace("notebooks/", "../") not in grown]
    assert not [link for link in links if not (page.parent / link).exists()]


def test_names_at_the_top_are_there_and_shown() -> None:
    assert dir(gb) == sorted({*gb.__all__}) and all(getattr(gb, name) is not None for name in gb.__all__)


UNUSED = """
import sys, torch
before = set(sys.modules)

def found(*names):
    print(sorted((sys.modules.keys() - before) & {*names}))

import gbfunc as gb
found("optree", *(f"gbfunc.{room}" for room in ("fit", "many", "module", "parallel", "storage", "train")))
print(gb.make_train_step is gb.train.make.make_train_step)
found("torch.distributed.tensor", "torch.utils.flop_counter", "torch.export")
gb.GenomeModule
found("huggingface_hub", "peft", "transformers", "accelerate")
from gbfunc.cli import main
try:
    main(["train", "--help"])
except SystemExit:
    print()
found("sklearn", "matplotlib", "scipy", "pandas")
import gbfunc.plots
found("matplotlib.pyplot")
"""


@pytest.mark.process
def test_what_a_program_does_not_use_is_not_imported() -> None:
    """In one process, as an import of torch takes seconds: the library, a module, help on a command, figures."""
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=True)
    first, second, third, fourth, *text, fifth, sixth = done.stdout.splitlines()
    assert second == "True" and "--epochs INT" in "".join(text)
    assert [first, third, fourth, fifth, sixth] == ["[]"] * 5


def test_no_name_is_that_of_a_room_and_other_names_are_refused() -> None:
    assert not [name for name in gb.__all__ if importlib.util.find_spec(f"gbfunc.{name}")]
    with pytest.raises(AttributeError, match="module 'gbfunc' has no attribute 'tile_gird'"):
        gb.tile_gird  # pyright: ignore[reportAttributeAccessIssue] # noqa: B018
