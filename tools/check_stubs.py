"""Holds every compiled module and its stub together: the same public names, members and parameters.

mypy trusts a stub blindly, and a compiled module has no source it could read instead, so a stub
that went stale would be believed. Types are not compared; names and their order are.
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator, Set
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
Function = ast.FunctionDef | ast.AsyncFunctionDef
# What every Python object, enum or Cython class has without anyone declaring it.
INHERITED = set(dir(object)) | {"__module__", "__weakref__", "__dict__"}


def public(name: str) -> bool:
    return not name.startswith("_")


def stub_names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not ast.unparse(node.annotation).endswith("TypeAlias"):  # a name for type checkers only
                names[node.target.id] = node
        elif isinstance(node, ast.Assign):
            names.update({t.id: node for t in node.targets if isinstance(t, ast.Name)})
    return {name: node for name, node in names.items() if public(name)}


def module_names(module: ModuleType) -> set[str]:
    """Public names that the module itself defines: constants, functions, classes."""
    return {
        name
        for name, value in vars(module).items()
        if public(name)
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", module.__name__) == module.__name__
    }


def parameters(value: object) -> list[str] | None:
    try:
        found = list(inspect.signature(value).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return [name for name in found if name not in {"self", "cls"}]


def stub_parameters(node: Function) -> list[str]:
    given = node.args
    named = [*given.posonlyargs, *given.args, *([given.vararg] if given.vararg else []), *given.kwonlyargs]
    named += [given.kwarg] if given.kwarg else []
    return [argument.arg for argument in named if argument.arg not in {"self", "cls"}]


def inner(value: object) -> bool:
    """True for a class that shows nothing: a cdef class a module keeps to itself."""
    return isinstance(value, type) and not any(map(public, vars(value)))


def compare_names(
    place: str, built: set[str], stubbed: set[str], hidden: Set[str] = frozenset()
) -> Iterator[str]:
    for name in sorted(built - stubbed - hidden):
        yield f"{place}: {name} is not in the stub"
    for name in sorted(stubbed - built):
        yield f"{place}: the stub has {name}, the module has not"


def compare_call(place: str, value: object, node: ast.stmt) -> Iterator[str]:
    if not isinstance(node, Function) or any(ast.unparse(d) == "overload" for d in node.decorator_list):
        return
    built = parameters(value)
    if built is not None and callable(value) and built != stub_parameters(node):
        yield f"{place}: takes ({', '.join(built)}), the stub says ({', '.join(stub_parameters(node))})"


def compare_class(place: str, built: type, node: ast.ClassDef) -> Iterator[str]:
    stubbed = stub_names(node.body)
    members = {name for name in vars(built) if public(name)}
    inherited = {name for base in built.__mro__[1:] for name in vars(base)}
    # Attributes set in __init__ of an ordinary class cannot be seen on the class.
    annotated = {name for name, member in stubbed.items() if isinstance(member, ast.AnnAssign)}
    yield from compare_names(place, members, set(stubbed) - (inherited - members) - (annotated - members))
    for name, member in stubbed.items():
        if name in members:
            yield from compare_call(f"{place}.{name}", inspect.getattr_static(built, name), member)


def compare(name: str) -> Iterator[str]:
    stub = ROOT / "fastserve" / "_ext" / f"{name}.pyi"
    if not stub.exists():
        yield f"{name}: no stub at fastserve/_ext/{name}.pyi"
        return
    module = importlib.import_module(f"fastserve._ext.{name}")
    stubbed = stub_names(ast.parse(stub.read_text()).body)
    built = module_names(module)
    hidden = {item for item in built if inner(getattr(module, item))}
    yield from compare_names(name, built, set(stubbed), hidden)
    for item, node in stubbed.items():
        value = getattr(module, item, None)
        if isinstance(node, ast.ClassDef) and isinstance(value, type):
            yield from compare_class(f"{name}.{item}", value, node)
        elif value is not None:
            yield from compare_call(f"{name}.{item}", value, node)


def main() -> int:
    modules = sorted(path.stem for path in (ROOT / "ext").glob("*.pyx"))
    faults = [fault for name in modules for fault in compare(name)]
    stubs = {path.stem for path in (ROOT / "fastserve" / "_ext").glob("*.pyi")}
    faults += [f"{name}: a stub without ext/{name}.pyx" for name in sorted(stubs - set(modules))]
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
