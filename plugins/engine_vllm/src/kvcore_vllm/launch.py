"""`kvcore run vllm`: vLLM's command line with a `--kv-transfer-config` that uses kvcore, and time to end."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcore.api import ConfigError, LaunchRequest
from kvcore_vllm.options import PREFIX
from kvcore_vllm.register import NAME, TIER, TIER_MODULE, TIER_NAME

FLAG = "--kv-transfer-config"
OFFLOADING = "--kv-offloading-size"
PARALLEL = {
    "--pipeline-parallel-size": ("-pp", "--pi"),
    "--prefill-context-parallel-size": ("-pcp", "--prefill-context"),
    "--decode-context-parallel-size": ("-dcp", "--decode-context"),
}
"""Flag -> its short form, and the shortest that we take for it."""
SHUTDOWN = "--shutdown-timeout"
SHUTDOWN_S = 20
"""Without the flag `vllm serve` kills its engine process as soon as it has asked it to end. As long as a cache that is
closed may wait for its tiers, ten seconds, and as long again for the requests that vLLM answers before."""
ROLES = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}

Transfer = dict[str, Any]
"""vLLM's `kv_transfer_config`."""


def with_kvcore(request: LaunchRequest) -> tuple[list[str], list[str]]:
    """The user's words with vLLM's flags, and what is new. Raises `ConfigError` when they cannot go together."""
    words, added = _with_transfer(request)
    if any(_names(word, SHUTDOWN, "--shu") for word in words):
        return words, added
    if any(_has(path, "shutdown[-_]timeout") for path in _files(words)):
        return words, added
    end = [SHUTDOWN, str(SHUTDOWN_S)]
    return [*words, *end], [*added, *end]


def _with_transfer(request: LaunchRequest) -> tuple[list[str], list[str]]:
    words, offloaded = _offloading(list(request.words), request.via)
    if request.via == "connector":
        _no_parallel(words)
    if offloaded is not None:
        request = replace(request, l1_bytes=offloaded)
    found = _flag(words)
    if found is None:
        _not_in_a_file(words)
        text = _text(_connector(request) if request.via == "connector" else _tier(request))
        return [*words, FLAG, text], [FLAG, text]
    at, count, given = found
    made = _merge(_parse(given), request)
    if offloaded is not None and made["kv_connector_extra_config"]["cpu_bytes_to_use"] != offloaded:
        raise ConfigError(f"{FLAG} has cpu_bytes_to_use, and {OFFLOADING} says another size: give it in one place")
    merged = _text(made)
    if _parse(merged) == _parse(given):
        return words, []
    words[at : at + count] = [FLAG, merged]
    return words, [FLAG, merged]


# -- what kvcore needs -------------------------------------------------------------------------------------------------


def _connector(request: LaunchRequest) -> Transfer:
    extra = _values(request, f"{PREFIX}config")
    made: Transfer = {"kv_connector": NAME, "kv_role": ROLES[request.role]}
    return {**made, "kv_connector_extra_config": extra} if extra else made


def _tier(request: LaunchRequest) -> Transfer:
    if request.role != "both":
        raise ConfigError(f"--role {request.role} needs the connector: leave out --via tier")
    tier = {"type": TIER_NAME, "module_path": TIER_MODULE, **_values(request, "config")}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": ROLES["both"],
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": request.l1_bytes,
            "secondary_tiers": [tier],
        },
    }


def _values(request: LaunchRequest, file: str) -> Transfer:
    """The file under this key, and what is laid over it."""
    named = {} if request.config is None else {file: request.config}
    return {**named, **{PREFIX + name: value for name, value in request.values.items()}}


# -- and what is there -------------------------------------------------------------------------------------------------


def _merge(given: Transfer, request: LaunchRequest) -> Transfer:
    """What the user has written, with what is missing of kvcore's."""
    connector = given.get("kv_connector")
    if connector == "MultiConnector":
        return _merge_multi(given, request)
    ours = _connector(request) if request.via == "connector" else _tier(request)
    if connector not in (None, ours["kv_connector"]):
        raise ConfigError(
            f"{FLAG} names the connector {connector!r}, and vLLM takes one: leave it out, or give both as the "
            f"connectors of MultiConnector, with {NAME} among them"
        )
    extra = _mapping(given.get("kv_connector_extra_config", {}), "kv_connector_extra_config")
    if request.via == "tier":
        wanted = _merge_tier(extra, ours["kv_connector_extra_config"])
    else:
        wanted = _filled(extra, ours.get("kv_connector_extra_config", {}), "kv_connector_extra_config")
    role = {} if request.role == "both" and "kv_role" in given else {"kv_role": ours["kv_role"]}
    merged = _filled(given, {"kv_connector": ours["kv_connector"], **role}, FLAG)
    return {**merged, "kv_connector_extra_config": wanted} if wanted else merged


def _merge_multi(given: Transfer, request: LaunchRequest) -> Transfer:
    """MultiConnector, whose order is the user's: what is missing of the child that is kvcore's."""
    extra = _mapping(given.get("kv_connector_extra_config", {}), "kv_connector_extra_config")
    children = extra.get("connectors")
    own = [c for c in children if _is_ours(c)] if isinstance(children, list) else []
    if request.via != "connector" or not own:
        raise ConfigError(
            f"{FLAG} has a MultiConnector without {NAME}: which of its connectors comes first is yours to say, so add "
            f"{_text(_connector(request))} to its `connectors`"
        )
    assert isinstance(children, list)
    merged = [_merge(child, request) if child is own[0] else child for child in children]
    return {**given, "kv_connector_extra_config": {**extra, "connectors": merged}}


def _is_ours(child: object) -> bool:
    return isinstance(child, dict) and child.get("kv_connector") == NAME


def _merge_tier(extra: Transfer, ours: Transfer) -> Transfer:
    tiers = extra.get("secondary_tiers", [])
    if not isinstance(tiers, list) or not all(isinstance(tier, dict) for tier in tiers):
        raise ConfigError(f"{FLAG}: kv_connector_extra_config.secondary_tiers must be a list of mappings")
    (tier,) = ours["secondary_tiers"]
    own = [t for t in tiers if t.get("type") in (TIER, TIER_NAME)]
    if not own:
        tiers = [*tiers, tier]
    elif own[0]["type"] == TIER:  # by the name that vLLM knows it by
        tier = {name: value for name, value in tier.items() if name not in ("type", "module_path")}
    tiers = [_filled(t, tier, f"the tier {t['type']}") if t in own[:1] else t for t in tiers]
    size = {"cpu_bytes_to_use": ours["cpu_bytes_to_use"]}
    merged = _filled(extra, {"spec_name": ours["spec_name"]}, "kv_connector_extra_config")
    return {**size, **merged, "secondary_tiers": tiers}


def _filled(given: Mapping[str, Any], ours: Mapping[str, Any], where: str) -> Transfer:
    """`given` and what it lacks. Raises `ConfigError` where they differ."""
    for name, value in ours.items():
        if name in given and given[name] != value:
            raise ConfigError(
                f"{where} says {name}: {given[name]!r}, and kvcore run would say {value!r}: give it in one place"
            )
    return {**given, **ours}


# -- words -------------------------------------------------------------------------------------------------------------


def _flag(words: Sequence[str]) -> tuple[int, int, str] | None:
    """Where the user's own flag stands, how many words it takes, and its JSON."""
    found = [(i, word) for i, word in enumerate(words) if _names(word, FLAG, "--kv-t")]
    if not found:
        return None
    if len(found) > 1 or "." in found[0][1].partition("=")[0]:
        raise ConfigError(f"{FLAG} is given in parts: write it once, as one JSON object")
    at, word = found[0]
    _, equals, text = word.partition("=")
    if equals:
        return at, 1, text
    if at + 1 == len(words):
        raise ConfigError(f"{FLAG}: its value is missing")
    return at, 2, words[at + 1]


def _names(word: str, flag: str, shortest: str) -> bool:
    """Whether vLLM takes the word for this flag: with `_` for `-`, `=VALUE`, `.KEY`, or abbreviated."""
    name = word.partition("=")[0].partition(".")[0].replace("_", "-")
    return flag.startswith(name) and name.startswith(shortest)


def _offloading(words: list[str], via: str) -> tuple[list[str], int | None]:
    """The words without vLLM's own switch for its offloading, whose connector would be another, and the bytes that it
    named."""
    at = next((i for i, word in enumerate(words) if _names(word, OFFLOADING, "--kv-offloading-s")), None)
    if at is None:
        return words, None
    name, equals, text = words[at].partition("=")
    if via != "tier":
        raise ConfigError(
            f"{name} makes vLLM offload by a connector of its own, and it takes one: leave it out, or have kvcore "
            "below vLLM's offloading with: kvcore run vllm --via tier"
        )
    text = text if equals else "".join(words[at + 1 : at + 2])
    try:
        nbytes = int(float(text) * (1 << 30))
    except (ValueError, OverflowError):
        nbytes = 0
    if nbytes <= 0:
        raise ConfigError(f"{name} {text}: write a number of GiB above 0")
    return words[:at] + words[at + (1 if equals else 2) :], nbytes


def _no_parallel(words: Sequence[str]) -> None:
    """What the connector refuses when vLLM starts, half a minute later."""
    for i, word in enumerate(words):
        name, equals, text = word.partition("=")
        flag = next((f for f, (short, least) in PARALLEL.items() if name == short or _names(word, f, least)), None)
        text = text if equals else "".join(words[i + 1 : i + 2])
        if flag is not None and text.isdecimal() and int(text) > 1:
            raise ConfigError(
                f"{name}: KVCoreConnector works with tensor parallel only; kvcore below vLLM's own offloading works "
                "with this, too: kvcore run vllm --via tier"
            )


def _not_in_a_file(words: Sequence[str]) -> None:
    """vLLM's own `--config FILE` may name a connector, too, which our flag would silently replace."""
    for path in _files(words):
        if _has(path, "kv[-_]transfer[-_]config"):
            raise ConfigError(
                f"{path} has kv-transfer-config: take it out there, or write it behind `--` as {FLAG} JSON"
            )


def _files(words: Sequence[str]) -> Iterator[Path]:
    """What vLLM's own `--config` names."""
    for i, word in enumerate(words):
        name, equals, path = word.partition("=")
        if name == "--config":
            yield Path(path if equals else "".join(words[i + 1 : i + 2]))


def _has(path: Path, key: str) -> bool:
    """Whether a file says this."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        return False  # vLLM says what is wrong with it
    return re.search(rf"^\s*['\"]?{key}\b", text, re.M) is not None


def _parse(text: str) -> Transfer:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{FLAG} is no JSON: {error}") from None
    return _mapping(value, FLAG)


def _mapping(value: object, what: str) -> Transfer:
    if not isinstance(value, dict):
        raise ConfigError(f"{what} must be a JSON object, not {json.dumps(value)[:60]}")
    return value


_text: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":")).encode
