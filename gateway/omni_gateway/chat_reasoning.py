"""How much a model is to think, as clients say it, in the variables of chat templates."""

from omni_common.errors import invalid
from omni_common.pipeline import Pipeline
from omni_gateway.chat_schema import ChatRequest
from omni_gateway.errors import quoted

#: The variables of chat templates that a request may set.
_KINDS: dict[str, type] = {"enable_thinking": bool, "reasoning_effort": str}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def read_reasoning(request: ChatRequest, pipeline: Pipeline) -> dict[str, bool | str]:
    """Variables for the template; which of them it knows is found where it is rendered.

    A pipeline whose model does not think takes any effort, since it changes nothing, and `enable_thinking: false`.
    Raises OmniError 400.
    """
    effort = request.reasoning_effort
    if effort is not None and effort not in _EFFORTS:
        text = f"reasoning_effort: {quoted(effort)} is none of {', '.join(_EFFORTS)}"
        raise invalid(text, "reasoning_effort")
    settings: dict[str, bool | str] = {}
    for key, value in (request.chat_template_kwargs or {}).items():
        where = f"chat_template_kwargs.{key}"
        if key not in _KINDS:
            text = f"chat_template_kwargs: {quoted(key)} is not supported; there are {', '.join(_KINDS)}"
            raise invalid(text, "chat_template_kwargs", code="unsupported_parameter")
        if type(value) is not _KINDS[key] or (isinstance(value, str) and value not in _EFFORTS):
            kinds = "true or false" if _KINDS[key] is bool else f"one of {', '.join(_EFFORTS)}"
            raise invalid(f"{where} must be {kinds}", where)
        if value is True and not pipeline.formats.reasoning:
            raise invalid(f"{where}: the model of {pipeline.name} does not think", where, code="unsupported_parameter")
        settings[key] = value if isinstance(value, bool) else str(value)
    if not pipeline.formats.reasoning:
        return {}
    if effort == "none":
        settings.setdefault("enable_thinking", False)
    elif effort is not None:
        settings.setdefault("reasoning_effort", effort)
    return settings
