"""What docs/http.md says: its endpoints, its YAML, its commands."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from http_client import TOKEN

from kvcore.config import load_config
from kvcore.plugins import Registry
from kvcore.testing.chunks import hashes, put, spec

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "http.md").read_text()


def test_the_table_has_every_endpoint_and_whether_it_needs_the_token(serve: Any) -> None:
    _, client = serve()
    said = {}
    for cells, _, token in re.findall(r"^\| (`[A-Z]+ /.*?`(?:, `.*?`)*) \| (.*) \| (yes|) ?\|$", PAGE, re.M):
        for method, path in re.findall(r"`([A-Z]+) (\S+)`", cells):
            said[method, path.replace("NAME", "{name}")] = bool(token)
    found = {
        (method.upper(), path): bool(operation["security"])
        for path, operations in client.api["paths"].items()
        for method, operation in operations.items()
    }
    del found["GET", "/openapi.json"]
    found["GET", "/tenants"] = found["PUT", "/tenants/{name}"]
    assert said == found


def test_the_configuration_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.S | re.M)
    path = tmp_path / "kvcore.yaml"
    path.write_text(text)
    config = load_config(path, env={}, registry=Registry())
    assert config.server is not None
    assert config.server.http is not None
    assert str(config.server.http.listen) == "127.0.0.1:7601"
    commands = re.findall(r"^    (kvcore .*)$", PAGE, re.M)
    assert commands == ["kvcore serve --config kvcore.yaml --http 127.0.0.1:7601"]  # test_http_serve runs it


def test_the_commands_work(serve: Any, tmp_path: Path) -> None:
    disk = f"[{{storage: {{plugin: disk, path: {tmp_path / 'disk'}, capacity: 1GiB}}}}]"
    engine, client = serve(disk, "l1: {size: 64MiB}\ntenants: {default: {l1: 4MiB}}")
    ours, alices = engine.register(spec()), engine.register(spec(), "alice")
    put(engine, ours, hashes())
    put(engine, alices, hashes())
    lines = re.findall(r"^    (curl .*)$", PAGE.replace("\\\n", ""), re.M)
    assert len(lines) == 6
    for line in lines:
        words = shlex.split(line.replace("$TOKEN", TOKEN).replace("NAMESPACE", ours.namespace.hex()))
        body = words[words.index("-d") + 1].replace("/mnt", str(tmp_path)) if "-d" in words else None
        method = words[words.index("-X") + 1] if "-X" in words else "POST" if body else "GET"
        (path,) = [w.removeprefix("http://127.0.0.1:7601") for w in words if w.startswith("http://")]
        assert f"Authorization: Bearer {TOKEN}" in words
        assert ("Content-Type: application/json" in words) == bool(body)
        status, text, _ = client.raw(method, path, body, {"Content-Type": "application/json"} if body else {})
        assert status in (200, 201), text
    status, text, _ = client.raw("PUT", "/tenants/", '{"quotas": {"l1": "8MiB"}}', {"Content-Type": "application/json"})
    assert (status, json.loads(text)["tenant"]) == (200, "")
    answer = client.ask("PUT", "/tenants/alice", {"quotas": {"disk": "1MiB"}})
    assert answer.status == 422
    assert "is not divided among tenants" in answer.body["detail"]
