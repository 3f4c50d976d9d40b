"""The package's imports: downwards only, and in no circle."""

import ast
import functools
import graphlib

from releases import ROOT

# From the lowest: folders, and the modules beside them. A module imports from its own layer and from those before it.
LAYERS = [
    ["core"],
    ["kernels"],
    ["backends"],
    ["call"],
    ["run"],
    ["features"],
    ["dtensor"],
    ["selected_log_probs", "vocab_parallel", "functional"],
    ["distillation", "modules", "rl"],
    ["style", "patching", "neighbours", "deferred"],
    ["torchtitan", "transformers", "trl", "verl", "megatron"],
]
PACKAGE = ROOT / "parallel_lce"


@functools.cache
def imports() -> dict[str, set[str]]:
    """The modules of the package that each imports, at the top of the file or in a function, by name."""
    files = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        found[name] = names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        found[name] = {imported for imported in names & files.keys() if imported != name}
    return found


def layer_of(module: str) -> int:
    part = module.split(".")[1]
    return next(number for number, names in enumerate(LAYERS) if part in names)


def test_imports_make_no_circle():
    graph = imports()
    # A package's name beside a module of it, as in "from parallel_lce.backends import torch_backend".
    plain = {
        name: {other for other in others if not any(o.startswith(f"{other}.") for o in others)}
        for name, others in graph.items()
    }
    assert len(graph) > 70 and [*graphlib.TopologicalSorter(plain).static_order()]


def test_no_module_imports_from_a_higher_layer():
    up = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if name != "parallel_lce" and other != "parallel_lce" and layer_of(other) > layer_of(name)
    ]
    assert not up


def test_no_door_guesses_at_its_neighbours():
    words = "_getframe f_back f_locals inspect.stack walk_stack FunctionType( co_filename getsource argparse._"
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert not [word for word in (*words.split(), "import ast") if word in text], path
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef) and function.name in ("forward", "__call__"):
                assert ".__class__ = " not in ast.unparse(function), (path, function.name)
