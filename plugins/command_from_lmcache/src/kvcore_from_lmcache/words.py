"""A command line that starts LMCache's server, or an engine with LMCache, as LMCache's settings."""

import json
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvcore.api import ConfigError
from kvcore.config.tree import MAX_DEPTH
from kvcore.config.yaml_file import scalar
from kvcore_from_lmcache.connector import ROLES
from kvcore_from_lmcache.draft import Setting, is_secret
from kvcore_from_lmcache.sources import FILE, MANY, PREFIX, Found, from_environment, over

TRANSFER, SGLANG_FILE = "--kv-transfer-config", "--lmcache-config-file"
OFFLOADING = ("--kv-offloading-size", "--kv-offloading-backend")
"""vLLM's short way to LMCache inside the engine."""
SERVERS = ("lmcache.v1.multiprocess.server", "lmcache.v1.multiprocess.http_server", "lmcache_server")
ENGINES = ("vllm", "vllm.entrypoints.openai.api_server", "sglang.launch_server", "dynamo.vllm")
OTHERS = {
    "lmcache_server": "LMCache's own remote store: for the engines of one machine `kvcore serve` is that; over "
    "machines use a tier that all reach, such as redis or s3",
    "lmcache_controller": "kvcore has no controller: each server has its metrics and HTTP interface (docs/http.md)",
    "lmcache.v1.api_server": "kvcore has no controller: each server has its metrics and HTTP interface (docs/http.md)",
    "lmcache.v1.mp_coordinator": "kvcore has no coordinator: a tier that all machines reach is what they share",
    "lmcache.v1.memory_coordinator": "kvcore has no coordinator: a tier that all machines reach is what they share",
    "lmcache coordinator": "kvcore has no coordinator: a tier that all machines reach is what they share",
}
"""Programs of LMCache without settings that kvcore could have."""
LIKE = '{"type": ...}'
LISTS = ("runtime-plugin-locations", "script-allowed-imports")
"""Flags with any number of values."""
NOT_HERE = "made when the pod starts: what stands in it is not in this file"
FROM_FILE = "the path that the engine sees: give that file, too"
_VARIABLE = re.compile(rf"(?:-e|--env)?=?({PREFIX}[A-Z0-9_]+)=(.*)", re.DOTALL)
_BETWEEN = ("&", "&&", ";", "|", "||")


class Word(NamedTuple):
    """One word of a command line, and where it stands; empty: on the command line itself."""

    text: str
    place: str = ""


def split(text: str, place: str = "") -> list[Word]:
    """The words of a shell's line or script."""
    plain = re.sub(r"(?m)^\s*#.*$", "", text).replace("\\\n", " ")
    try:
        found = shlex.split(plain)
    except ValueError:  # a script with a quotation mark of its own: good enough to find flags in
        found = plain.split()
    return [Word(word, place) for word in found]


def from_words(words: Sequence[Word]) -> Found:
    """The settings in a command line, or in all those of a script. Raises `ConfigError` for JSON that is none."""
    found, at = Found(), 0
    for end in (*(i for i, word in enumerate(words) if word.text in _BETWEEN), len(words)):
        found.add(_command(words[at:end]))
        at = end + 1
    return found


def file_of(words: Sequence[Word]) -> Word | None:
    """The YAML file that the command names, as a variable or a flag of SGLang's."""
    for i, word in enumerate(words):
        variable = _VARIABLE.fullmatch(word.text)
        if variable is not None and variable[1] == FILE:
            return Word(variable[2], word.place)
        name, equals, value = word.text.partition("=")
        if name == SGLANG_FILE:
            return Word(value, word.place) if equals else next(iter(words[i + 1 : i + 2]), None)
    return None


def other_program(words: Sequence[Word]) -> str | None:
    """What is to be said of a program of LMCache that has nothing to convert."""
    for i, word in enumerate(words):
        name = posixpath.basename(word.text)
        if name == "lmcache" and i + 1 < len(words) and words[i + 1].text != "server":
            name = f"lmcache {words[i + 1].text}"
        if name in OTHERS and not (name == "lmcache_server" and any(w.text.startswith("--") for w in words[i:])):
            return f"{name}: {OTHERS[name]}"
    return None


def _command(words: Sequence[Word]) -> Found:
    variables = {match[1]: (match[2], word) for word in words if (match := _VARIABLE.fullmatch(word.text))}
    env = from_environment(
        {name: text for name, (text, _) in variables.items()},
        {name: word.place or name for name, (_, word) in variables.items()},
    )
    start = _program(words)
    if start is None:
        return Found(engine=env)
    if start < 0:
        return _engine(words, env)
    flags, lost = over([s.named(s.name.replace("_", "-")) for s in env], _flags(words[start:]))
    return Found(server=flags, beside=[(setting, "the flag says otherwise") for setting in lost])


def _program(words: Sequence[Word]) -> int | None:
    """Where the flags of LMCache's server begin; -1: it is an engine; None: neither."""
    for i, word in enumerate(words):
        name = posixpath.basename(word.text)
        if name == "lmcache" and i + 1 < len(words) and words[i + 1].text == "server":
            return i + 2
        if name in SERVERS:
            return i + 1
        if name in ENGINES or word.text.partition("=")[0] in (TRANSFER, SGLANG_FILE, *OFFLOADING):
            return -1
    return 0 if words and words[0].text.startswith("--") else None


# -- LMCache's server --------------------------------------------------------------------------------------------------


def _flags(words: Sequence[Word]) -> list[Setting]:
    """An adapter's JSON becomes one setting, a mapping."""
    flags: list[tuple[Word, list[str]]] = []
    for word in words:
        if word.text.startswith("--"):
            name, equals, value = word.text[2:].partition("=")
            flags.append((Word(name, word.place or f"--{name}"), [value] if equals else []))
        elif flags:
            flags[-1][1].append(word.text)
    return [_flag(word, values) for word, values in flags]


def _flag(word: Word, values: list[str]) -> Setting:
    name, place = word
    text = " ".join(values)
    if name in MANY:
        return Setting(place, name, _json(f"--{name}", Word(text, "" if place == f"--{name}" else place), LIKE))
    if name in LISTS:
        return Setting(place, name, values)
    if not values:
        off = name.startswith("no-")
        return Setting(place, name.removeprefix("no-"), not off)
    return Setting(place, name, scalar(text))


def _json(flag: str, word: Word, like: str) -> Any:
    """The value. In a manifest, where a shell may still fill in something, text when it is none: may be a secret."""
    try:
        value = json.loads(word.text)
    except ValueError as e:
        if word.place:
            return "..."
        raise ConfigError(f"{flag} is no JSON ({e}): quote it as for LMCache, '{like}'") from None
    except RecursionError:
        deep = True
    else:
        deep = _is_deep(value)
    if deep:
        raise ConfigError(f"{flag} is nested deeper than {MAX_DEPTH} levels: write it as for LMCache, '{like}'")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [value for values in inner for value in values]
    return bool(level)


# -- an engine ---------------------------------------------------------------------------------------------------------


def _engine(words: Sequence[Word], env: list[Setting]) -> Found:
    found = Found(start=_start(words))
    inside: list[Setting] = []
    size = _value(words, OFFLOADING[0])
    backend = _value(words, OFFLOADING[1])
    if backend is not None and backend.text == "lmcache":
        found.connector.append(Setting(backend.place or OFFLOADING[1], "kv_offloading_backend", "lmcache"))
        if size is not None:
            place = size.place or OFFLOADING[0]
            inside.append(Setting(place, "kv_offloading_size", scalar(size.text)).named("max_local_cpu_size"))
    given = _value(words, TRANSFER)
    served = False
    if given is not None and given.text.startswith("$"):
        found.beside.append((Setting(given.place or TRANSFER, "kv_transfer_config", given.text), NOT_HERE))
    elif given is not None:
        config = _json(TRANSFER, given, '{"kv_connector": ...}')
        if isinstance(config, str):
            found.beside.append((Setting(given.place, "kv_transfer_config", config), NOT_HERE))
        served = _transfer(config if isinstance(config, Mapping) else {}, given.place or TRANSFER, found, inside)
    elif backend is None and not any(word.text == "--enable-lmcache" for word in words) and not env:
        return Found()  # an engine without LMCache
    if served:
        found.server += [s.named(s.name.replace("_", "-")) for s in env]
        return found
    found.engine, lost = over(env, inside)
    found.beside += [(setting, "the engine's flags say otherwise") for setting in lost]
    return found


def _transfer(config: Mapping[str, Any], place: str, found: Found, inside: list[Setting]) -> bool:
    """Read a `kv_transfer_config`: True when its LMCache is a server."""
    extra = config.get("kv_connector_extra_config")
    extra = extra if isinstance(extra, Mapping) else {}
    parts = extra.get("connectors")
    if config.get("kv_connector") == "MultiConnector" and isinstance(parts, list):
        found.connector.append(Setting(place, "kv_connector", "MultiConnector"))
        found.start = []  # the other connectors keep their place: docs/server.md
        served = [_transfer(part, place, found, inside) for part in parts if isinstance(part, Mapping)]  # all of them
        return any(served)
    role = ROLES.get(str(config.get("kv_role")), "both")
    if found.start and role != "both":
        found.start[3:3] = ["--role", role]
    for name, value in config.items():
        if name != "kv_connector_extra_config":
            found.connector.append(Setting(place, str(name), value))
    for name, value in extra.items():
        if name == "lmcache.mp.autostart.server_args":
            found.server += _flags(split(str(value), place))
        elif name.startswith("lmcache.") and not name.startswith("lmcache.mp."):
            inside.append(Setting(place, name, value).named(name.removeprefix("lmcache.")))
        else:
            found.connector.append(Setting(place, str(name), value))
    return "MP" in str(config.get("kv_connector"))


def _value(words: Sequence[Word], flag: str) -> Word | None:
    for i, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        if name == flag:
            if equals:
                return Word(value, word.place)
            return Word(words[i + 1].text, words[i + 1].place) if i + 1 < len(words) else None
    return None


def _start(words: Sequence[Word]) -> list[str]:
    """The engine's command with kvcore in LMCache's place, where it is one that a user types."""
    texts = [word.text for word in words]
    for engine, begin in (("vllm", "vllm"), ("sglang", "sglang.launch_server")):
        at = next((i for i, text in enumerate(texts) if posixpath.basename(text) == begin), None)
        if at is not None and not words[at].place:
            rest = texts[at + 1 :]
            for flag in (TRANSFER, SGLANG_FILE, *OFFLOADING):
                while (i := next((i for i, t in enumerate(rest) if t.partition("=")[0] == flag), None)) is not None:
                    del rest[i : i + (1 if "=" in rest[i] else 2)]
            return ["kvcore", "run", engine, "--", *_masked(text for text in rest if text != "--enable-lmcache")]
    return []


def _masked(texts: Iterable[str]) -> Iterator[str]:
    """The same without secrets: the values of `--api-key` are the user's to fill in."""
    secret = False
    for text in texts:
        name, equals, _ = text.partition("=")
        if text.startswith("-"):
            secret = is_secret(name)
            yield f"{name}=***" if secret and equals else text
        else:
            yield "***" if secret else text
