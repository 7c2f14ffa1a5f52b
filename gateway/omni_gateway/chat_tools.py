"""Tools of a chat request: what may be called, what must be, and what was called before. Checked, bounded, typed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from omni_common.errors import OmniError, invalid
from omni_common.formats import forced_call
from omni_common.frames import ToolCall
from omni_common.pipeline import Pipeline
from omni_gateway.chat_schema import ChatRequest
from omni_gateway.errors import quoted, shorten

T = TypeVar("T")
#: OpenAI's.
_TOOLS = 128
_CALLS = 128
#: Levels of a schema or of arguments.
_DEPTH = 32
#: No letter that JSON or a template would escape.
_Name = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class _Function(msgspec.Struct, omit_defaults=True):
    name: _Name
    description: Annotated[str, Meta(max_length=4096)] | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    type: str
    function: _Function | None = None


class _NamedFunction(msgspec.Struct):
    name: str


class _Choice(msgspec.Struct):
    type: str
    function: _NamedFunction | None = None


class _PastFunction(msgspec.Struct):
    name: _Name
    arguments: str


class _PastCall(msgspec.Struct):
    id: Annotated[str, Meta(min_length=1, max_length=128)]
    function: _PastFunction
    type: str = "function"


@dataclass(frozen=True, slots=True)
class Tools:
    """What the answer may call; without names: nothing."""

    names: frozenset[str] = frozenset()
    #: As a stage takes them, see `Prompt` in `frames.py`.
    json: str = ""
    #: The one that must be called, and with what the answer begins then.
    forced: str = ""
    prefix: str = ""
    #: Only one call.
    single: bool = False


def read_tools(request: ChatRequest, pipeline: Pipeline) -> Tools:
    """Raises OmniError 400 for what is wrong, and for what cannot be served."""
    if not pipeline.formats.tools:
        if request.tools not in (None, []):
            raise _unsupported("tools", f"{pipeline.name} calls no tools")
        if request.tool_choice not in (None, "none"):
            raise _unsupported("tool_choice", f"{pipeline.name} calls no tools")
        return Tools()
    listed = _typed(request.tools or [], Annotated[list[_Tool], Meta(max_length=_TOOLS)], "tools")
    functions: dict[str, _Function] = {}
    for index, tool in enumerate(listed):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise invalid(f"{where}.type: {quoted(tool.type)} is not supported; use function", f"{where}.type")
        if tool.function is None:
            raise invalid(f"{where}.function is missing", f"{where}.function", code="missing_required_parameter")
        if tool.function.name in functions:
            raise invalid(f"{where}.function.name stands twice", f"{where}.function.name")
        if _deeper(tool.function.parameters, _DEPTH):
            where += ".function.parameters"
            raise invalid(f"{where} has more than {_DEPTH} levels", where)
        functions[tool.function.name] = tool.function
    allowed, forced = _choice(request.tool_choice, functions)
    if not allowed:
        return Tools()
    written = msgspec.json.encode([{"type": "function", "function": f} for f in functions.values()]).decode()
    if len(written) > pipeline.limits.text_chars:
        text = f"tools: more than {pipeline.limits.text_chars} characters"
        raise invalid(text, "tools", code="string_above_max_length")
    return Tools(
        names=frozenset(functions),
        json=written,
        forced=forced,
        prefix=forced_call(forced) if forced else "",
        single=request.parallel_tool_calls is False,
    )


def _choice(asked: Any, functions: dict[str, _Function]) -> tuple[bool, str]:
    """Whether tools may be called, and the name of one that must be."""
    where = "tool_choice"
    if asked is None:
        return bool(functions), ""
    if isinstance(asked, str):
        if asked not in ("none", "auto", "required"):
            raise invalid(f"{where}: {quoted(asked)} is none of none, auto, required", where)
        if asked != "none" and not functions:
            raise invalid(f"{where} is only allowed with tools", where)
        if asked == "required":
            if len(functions) > 1:
                text = f"{where}: which of several tools must be called cannot be left open here; name one, or use auto"
                raise _unsupported(where, text)
            return True, next(iter(functions))
        return asked == "auto", ""
    named = _typed(asked, _Choice, where)
    if named.type != "function" or named.function is None:
        raise _unsupported(f"{where}.type", f"{where}.type: {quoted(named.type)} is not supported; use function")
    if named.function.name not in functions:
        param = f"{where}.function.name"
        raise invalid(f"{param}: {quoted(named.function.name)} is none of the tools", param)
    return True, named.function.name


def read_calls(asked: Any, where: str, take: Callable[[str, str], object]) -> list[ToolCall]:
    """The calls of an earlier answer. `take(text, where)` counts characters. Raises OmniError 400."""
    calls = []
    for index, call in enumerate(_typed(asked, Annotated[list[_PastCall], Meta(max_length=_CALLS)], where)):
        at = f"{where}[{index}]"
        if call.type != "function":
            raise invalid(f"{at}.type: {quoted(call.type)} is not supported; use function", f"{at}.type")
        at += ".function.arguments"
        take(call.function.arguments, at)
        try:
            arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            raise invalid(f"{at} is no JSON object", at) from None
        if _deeper(arguments, _DEPTH):
            raise invalid(f"{at} has more than {_DEPTH} levels", at)
        calls.append(ToolCall(call.id, call.function.name, call.function.arguments or "{}"))
    return calls


def _deeper(value: Any, levels: int) -> bool:
    """Whether mappings and lists are nested beyond `levels`."""
    level = [value]
    for _ in range(levels + 1):
        nested = [item for item in level if isinstance(item, dict | list)]
        if not nested:
            return False
        level = [child for item in nested for child in (item.values() if isinstance(item, dict) else item)]
    return True


def _typed(value: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        path = where + path.rstrip("`")
        code = "array_above_max_length" if "`array` of length <=" in text else "invalid_type"
        if "missing required field" in text:
            path, code = f"{path}.{text.split('`')[1]}", "missing_required_parameter"
        raise invalid(f"{path}: {shorten(text, 200)}", path, code=code) from None


def _unsupported(param: str, text: str) -> OmniError:
    return invalid(text, param, code="unsupported_parameter")
