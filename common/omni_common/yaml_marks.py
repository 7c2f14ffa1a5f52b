"""YAML in which every key and value remembers where it stands, so that a wrong one can be named by line and column.

The YAML 1.2 core schema, without its NaN and infinities: `no` is a string, `1e-5` a number, `010` a string. Duplicate
keys, tags and keys that are not strings are errors.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

Scalar = str | int | float | bool | None
#: From line and column (both from 0) to what is shown to people.
Locate = Callable[[int, int], str]


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it stands; `key_at` is the place of its key when it is a member of a mapping."""

    value: "dict[str, Node] | list[Node] | Scalar"
    at: str
    key_at: str = ""

    def plain(self) -> Any:
        """The value as plain dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def members(self) -> "dict[str, Node]":
        """Members of a mapping; nothing for any other value."""
        return self.value if isinstance(self.value, dict) else {}

    def at_path(self, *path: str) -> "Node":
        """The node at `path`, or the deepest one that exists on the way there."""
        node = self
        for key in path:
            child = node.members().get(key)
            if child is None:
                break
            node = child
        return node


class YamlError(ValueError):
    """The text is not the YAML that is read here; the message begins with the place."""


def parse(text: str, locate: Locate) -> Node:
    """Parse one YAML document. An empty one is null. Raises YamlError."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        return Node(None, locate(0, 0)) if root is None else _build(loader, root, locate, frozenset())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = locate(mark.line, mark.column) if mark else locate(0, 0)
        raise YamlError(f"{place}: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        raise YamlError(f"{locate(0, 0)}: {error.reason} (character {error.position})") from None


def merge(below: Node, above: Node) -> Node:
    """`above` over `below`: mappings are merged member by member, everything else is replaced."""
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    members = dict(below.value)
    for key, node in above.value.items():
        members[key] = merge(members[key], node) if key in members else node
    return Node(members, below.at, below.key_at)


def nest(path: list[str], leaf: Node) -> Node:
    """`leaf` as the only member at `path`, everything in the place of the leaf."""
    for key in reversed(path):
        leaf = Node({key: Node(leaf.value, leaf.at, leaf.at)}, leaf.at, leaf.at)
    return leaf


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


_TAG = "tag:yaml.org,2002:"
for _kind, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ("float", r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), _first)


def _build(loader: _Loader, node: yaml.Node, locate: Locate, above: frozenset[int]) -> Node:
    place = locate(node.start_mark.line, node.start_mark.column)
    if id(node) in above:
        raise YamlError(f"{place}: an anchor that holds itself")
    above |= {id(node)}
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        return Node(dict(_members(loader, node, locate, above)), place)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return Node([_build(loader, item, locate, above) for item in node.value], place)
    if isinstance(node, yaml.ScalarNode) and node.tag.removeprefix(_TAG) in ("str", "bool", "null", "int", "float"):
        try:
            value: Scalar = loader.construct_object(node)
        except (ValueError, KeyError):
            raise YamlError(f"{place}: {node.value[:40]!r} is no {node.tag.removeprefix(_TAG)}") from None
        return Node(value, place)
    raise YamlError(f"{place}: tags such as {node.tag} are not read here")


def _members(
    loader: _Loader, node: yaml.MappingNode, locate: Locate, above: frozenset[int]
) -> Iterator[tuple[str, Node]]:
    seen: dict[str, str] = {}
    for key_node, value_node in node.value:
        place = locate(key_node.start_mark.line, key_node.start_mark.column)
        if key_node.tag != _TAG + "str":
            raise YamlError(f"{place}: the key {str(key_node.value)[:40]!r} is not a string; put it in quotes")
        key = key_node.value
        if key in seen:
            raise YamlError(f"{place}: the key `{key}` stands twice; the first is at {seen[key]}")
        seen[key] = place
        value = _build(loader, value_node, locate, above)
        yield key, Node(value.value, value.at, place)
