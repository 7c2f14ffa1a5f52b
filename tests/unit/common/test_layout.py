"""The shape of the source, read from its syntax trees: who may import whom, and what may not be written at all."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = {
    "omni_common": ROOT / "common",
    "omni_gateway": ROOT / "gateway",
    "omni_scheduler": ROOT / "services",
    "omni_worker": ROOT / "services",
    "omni_supervisor": ROOT / "services",
}
SOURCES = sorted(file for package, folder in FOLDERS.items() for file in (folder / package).rglob("*.py"))
SCRIPTS = sorted((ROOT / "tools").rglob("*.py"))
MAX_LINES = 500

HEAVY = {"torch", "transformers", "diffusers", "vllm", "onnxruntime", "onnx", "ctranslate2", "tokenizers", "xllamacpp"}
ON_TORCH = {"torch", "transformers", "diffusers", "vllm"}
#: Engines on torch, what they share, and their models: imported by the workers that are told to, and by `omni prepare`.
TORCH_FILES = re.compile(
    r"services/omni_worker/("
    r"engines/(autoregressive|codec|cuda_graphs|processor\w*|sampler|sequence|slot_cache|torch_arrays|vllm\w*)"
    r"|models/(omni|qwen)\w*|split|torchvision_shim|weights)\.py$"
)
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"recv_pyobj", "send_pyobj", "unsafe_load", "full_load", "unsafe_load_all", "full_load_all"}
QUEUES = {"Queue", "LifoQueue", "PriorityQueue", "JoinableQueue"}
SAFE_LOADERS = {"SafeLoader", "CSafeLoader"}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; `from a import b` counts as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)


def wrong_imports(package: str, file: str, tree: ast.AST) -> Iterator[str]:
    for line, name in imports(tree):
        top = name.split(".")[0]
        if name.startswith("."):
            yield f"{file}:{line}: relative import"
        elif top in FOLDERS and top not in (package, "omni_common"):
            yield f"{file}:{line}: {package} imports {top}; only omni_common is common"
        elif top in HEAVY and package != "omni_worker":
            yield f"{file}:{line}: {package} imports {top}; only workers may load models"
        elif top in ON_TORCH and not TORCH_FILES.search(file):
            yield f"{file}:{line}: imports {top}; a worker of another engine would load it"
        elif top == "zmq" and file != "common/omni_common/sockets.py":
            yield f"{file}:{line}: imports zmq; sockets are made in omni_common.sockets only"


def unsafe(file: str, tree: ast.AST) -> Iterator[str]:
    for line, name in imports(tree):
        if name.split(".")[0] in UNSAFE_MODULES:
            yield f"{file}:{line}: imports {name}"
        elif name.startswith("multiprocessing.shared_memory"):
            yield f"{file}:{line}: its resource tracker deletes live segments; use omni_common's arena"
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{file}:{node.lineno}: bare except"
        elif isinstance(node, ast.Call):
            called = _last_name(node.func)
            if called in UNSAFE_CALLS:
                yield f"{file}:{node.lineno}: {called}"
            elif called in ("load", "load_all") and ast.unparse(node.func).startswith("yaml.") and not _is_safe(node):
                yield f"{file}:{node.lineno}: yaml.{called} without SafeLoader"
            elif called in QUEUES and not _is_bounded(node):
                yield f"{file}:{node.lineno}: {called} without a maxsize"


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_safe(call: ast.Call) -> bool:
    loaders = [*call.args[1:], *(word.value for word in call.keywords if word.arg == "Loader")]
    return any(_last_name(loader) in SAFE_LOADERS for loader in loaders)


def _is_bounded(call: ast.Call) -> bool:
    sizes = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "maxsize")]
    return any(not (isinstance(size, ast.Constant) and not size.value) for size in sizes)


def parse(file: Path) -> tuple[str, ast.Module]:
    return str(file.relative_to(ROOT)), ast.parse(file.read_bytes())


def package_of(file: Path) -> str:
    return next(part for part in file.parts if part in FOLDERS)


def test_there_is_something_to_look_at() -> None:
    assert {package_of(file) for file in SOURCES} == FOLDERS.keys()


def test_imports_point_one_way() -> None:
    assert [line for file in SOURCES for line in wrong_imports(package_of(file), *parse(file))] == []


def test_the_supervisor_only_needs_what_the_core_install_has() -> None:
    allowed = {*sys.stdlib_module_names, "omni_common", "omni_supervisor", "aiohttp", "msgspec"}
    files = [file for file in SOURCES if package_of(file) == "omni_supervisor"]
    found = {f"{path}:{line}: {name}" for path, tree in map(parse, files) for line, name in imports(tree)
             if name.split(".")[0] not in allowed}  # fmt: skip
    assert found == set()


def test_nothing_unsafe_is_written() -> None:
    assert [line for file in SOURCES + SCRIPTS for line in unsafe(*parse(file))] == []


def test_modules_stay_short() -> None:
    long = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in SOURCES + SCRIPTS}
    # The protocol is described once, in one module, and most of it is documentation.
    del long["common/omni_common/frames.py"]
    assert {file: lines for file, lines in long.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize("package", ["omni_common", "omni_gateway", "omni_scheduler", "omni_supervisor"])
def test_importing_loads_no_model_library(package: str) -> None:
    code = (
        f"import importlib, pkgutil, sys, {package}\n"
        f"names = [m.name for m in pkgutil.walk_packages({package}.__path__, '{package}.')]\n"
        "for name in names: importlib.import_module(name)\n"
        f"print(len(names), sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, _, loaded = done.stdout.strip().partition(" ")
    assert int(count) > 0
    assert loaded == "[]"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from multiprocessing import shared_memory",
        "from multiprocessing.shared_memory import SharedMemory",
        "try: pass\nexcept: pass",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "socket.recv_pyobj()",
        "asyncio.Queue()",
        "queue.Queue(0)",
        "asyncio.Queue[int](maxsize=0)",
    ],
)
def test_the_check_sees_what_is_unsafe(code: str) -> None:
    assert len(list(unsafe("x.py", ast.parse(code)))) == 1


def test_the_check_lets_pass_what_is_safe() -> None:
    code = "yaml.load(t, Loader=yaml.SafeLoader)\nyaml.safe_load(t)\nqueue.Queue(8)\nQueue(maxsize=n)\njson.load(f)"
    assert list(unsafe("x.py", ast.parse(code))) == []


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("omni_common", "import omni_gateway"),
        ("omni_gateway", "from omni_scheduler.fleet import Fleet"),
        ("omni_worker", "def f():\n    import omni_gateway.main"),
        ("omni_gateway", "import onnxruntime"),
        ("omni_worker", "import torch.nn"),
        ("omni_worker", "import zmq.asyncio"),
        ("omni_worker", "from . import engine"),
    ],
)
def test_the_check_sees_a_wrong_import(package: str, code: str) -> None:
    assert len(list(wrong_imports(package, "x.py", ast.parse(code)))) == 1
