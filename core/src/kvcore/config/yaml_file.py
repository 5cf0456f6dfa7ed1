"""YAML with the position of every value. Safe: no tags, no duplicate keys, bounded size, depth and expansion."""

from pathlib import Path as FilePath
from typing import Any

import yaml

from kvcore.config.tree import MAX_DEPTH, MAX_INT, NO_TEXT, Fault, Path, Source, Tree, abridged, is_text, show

MAX_BYTES = 1 << 20
MAX_VALUES = 10_000
"""Values after expansion of aliases, so that a few lines cannot grow into gigabytes."""

_PREFIX = "tag:yaml.org,2002:"
_PLAIN = {_PREFIX + tag for tag in ("null", "bool", "int", "float", "str", "timestamp")}


class _TooMuchError(Exception):
    pass


def read_file(path: str) -> tuple[Tree, list[Fault]]:
    """The tree of a file. Never raises for what is in the file or for a file that cannot be read: those are faults."""
    text = text_of(path)
    return (Tree(), [text]) if isinstance(text, Fault) else read_text(text, path)


def text_of(path: str) -> str | Fault:
    """What is in the file, or why that cannot be had."""
    named = abridged(path)
    try:
        file = FilePath(path).expanduser()
        if file.is_dir():
            return Fault(named, "", "is a directory: give the path of a YAML file")
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Fault(named, "", "does not exist")
    except (OSError, RuntimeError, ValueError) as e:  # also `~nobody` and a NUL in the name
        return Fault(named, "", f"cannot be read: {getattr(e, 'strerror', None) or e}")
    if len(data) > MAX_BYTES:
        return Fault(path, "", f"is larger than {MAX_BYTES // 1024} KiB: this is no configuration")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        return Fault(path, "", f"is not UTF-8 text (byte {e.start}): give a YAML file")


def read_text(text: str, name: str) -> tuple[Tree, list[Fault]]:
    """The tree of a YAML document; `name` stands for the file in places. An empty document is an empty tree."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        return Tree(), [Fault(place, "", f"is not YAML: {' '.join(filter(None, (e.context, e.problem)))}")]
    except yaml.YAMLError as e:
        return Tree(), [Fault(name, "", f"is not YAML: {' '.join(str(e).split())}")]
    except RecursionError:
        return Tree(), [Fault(name, "", f"is nested deeper than {MAX_DEPTH} levels")]
    tree = Tree()
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _PREFIX + "null"):
        tree.sources[()] = Source("file", name)
        return tree, []
    builder = _Builder(name)
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "one plain value"
        return tree, [Fault(builder.place(node), "", f"must be a mapping (`key: value` lines), not {kind}")]
    try:
        value = builder.value(node, ())
    except _TooMuchError as e:
        return Tree(), [Fault(name, "", str(e))]
    return Tree(value, builder.sources), builder.faults


def scalar(text: str) -> Any:
    """What YAML reads in one plain value: `256` is an int, `true` a bool, `8GiB` text."""
    loader = yaml.SafeLoader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return _construct(yaml.ScalarNode(tag, text))


def _construct(node: yaml.ScalarNode) -> Any:
    if node.tag == _PREFIX + "timestamp":
        return node.value  # a date is text here: no option is a date, and names may look like one
    try:
        value = yaml.constructor.SafeConstructor().construct_object(node)
    except (ValueError, LookupError):  # `!!int x`, `!!bool x`, `!!int ""`: for the types to refuse
        return node.value
    # A number of thousands of digits is no option's value, and Python refuses to write it out again.
    return node.value if type(value) is int and abs(value) > MAX_INT else value


class _Builder:
    def __init__(self, name: str) -> None:
        self.sources: dict[Path, Source] = {}
        self.faults: list[Fault] = []
        self._name = name
        self._count = 0

    def place(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def value(self, node: yaml.Node, path: Path, key: yaml.Node | None = None) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise _TooMuchError(f"holds more than {MAX_VALUES} values after its aliases are expanded")
        if len(path) > MAX_DEPTH:
            raise _TooMuchError(f"is nested deeper than {MAX_DEPTH} levels")
        mark = node.start_mark
        at_key = (key.start_mark.line + 1, key.start_mark.column + 1) if key is not None else None
        self.sources[path] = Source("file", self._name, mark.line + 1, mark.column + 1, at_key)
        if isinstance(node, yaml.MappingNode):
            if node.tag != _PREFIX + "map":
                self._tag(node, path)
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            if node.tag != _PREFIX + "seq":
                self._tag(node, path)
            return [self.value(child, (*path, i)) for i, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        if node.tag not in _PLAIN:
            self._tag(node, path)
            return None
        value = _construct(node)
        if isinstance(value, str) and not is_text(value):
            self.faults.append(Fault(self.place(node), show(path), f"is {NO_TEXT}"))
            return ""
        return value

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merged: list[yaml.MappingNode] = []
        for key, child in node.value:
            if key.tag == _PREFIX + "merge":
                merged += self._merged(child, path)
                continue
            if not isinstance(key, yaml.ScalarNode):
                self.faults.append(Fault(self.place(key), show(path), "a key must be a plain word"))
                continue
            name = key.value  # as written: YAML would read `on` as true
            if name in lines:
                text = f"is written twice, first in line {lines[name]}: keep one"
                self.faults.append(Fault(self.place(key), show((*path, name)), text))
                continue
            lines[name] = key.start_mark.line + 1
            own[name] = self.value(child, (*path, name), key)
        done: list[yaml.MappingNode] = []
        while merged:  # one may merge others, or itself
            done.append(other := merged.pop(0))
            inner: list[yaml.MappingNode] = []
            for key, child in other.value:
                if key.tag == _PREFIX + "merge":
                    inner += self._merged(child, path)
                elif isinstance(key, yaml.ScalarNode) and key.value not in own:
                    own[key.value] = self.value(child, (*path, key.value), key)
            merged[:0] = [node for node in inner if node not in done]
        return own

    def _merged(self, node: yaml.Node, path: Path) -> list[yaml.MappingNode]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if all(isinstance(n, yaml.MappingNode) for n in nodes):
            return list(nodes)
        self.faults.append(Fault(self.place(node), show(path), "`<<` merges mappings only"))
        return []

    def _tag(self, node: yaml.Node, path: Path) -> None:
        text = f"has the tag {node.tag!r}: tags are not allowed, write a plain value"
        self.faults.append(Fault(self.place(node), show(path), text))
