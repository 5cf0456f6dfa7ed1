"""examples/monitoring: the dashboard and the alert rules speak of metrics and labels that there are, in Grafana's and
Prometheus' own words, and answer in a real Prometheus."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from kvcore.observe import METRICS, Metrics
from kvcore.observe.exposition import serve
from kvcore.testing.servers import Server, free_port

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "monitoring.md").read_text()
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "monitoring"
ENGINES = {"load_failures", "faults"}
"""Counters of kvcore-vllm itself."""
ADDED = {"job", "instance", "le", "__name__"}
DEADLINE_S = 120
PROMTOOL = (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts.test.yaml"])
PAGE_QUERIES = re.findall(r"^\| [^|]*\? \| `(.*)` \|$", PAGE, re.M)


def tool(name: str) -> str:
    found = shutil.which(name)
    assert found, f"no {name} here: apt-get install prometheus (make test does)"
    return found


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("monitoring_dashboard", FOLDER / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # NamedTuple looks there
    spec.loader.exec_module(module)
    return module


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return found


def queries() -> Iterator[tuple[str, str]]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def alerts() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule["alert"], rule["expr"]


def metrics_of(expression: str) -> set[str]:
    """Names in METRICS of what an expression reads. One that is not there fails."""
    found = set()
    for full in re.findall(r"(?:\$\{prefix\}|kvcore_)(\(?\w[\w|)]*)", expression):
        whole = re.sub(r"^\((\w+)\|(\w+)\)", r"\1", full)
        name = next(
            (
                n
                for n in (whole, *(whole.removesuffix(s) for s in ("_total", "_bucket", "_sum", "_count")))
                if n in METRICS or n in ENGINES
            ),
            None,
        )
        assert name is not None, f"there is no metric {full}"
        if name in METRICS:
            suffix = whole.removeprefix(name)
            assert (
                suffix
                in {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[
                    METRICS[name].kind
                ]
            )
            found.add(name)
    assert found or "load_failures" in expression, expression
    return found


def labels_of(expression: str) -> set[str]:
    by = re.findall(r"by \(([^)]*)\)", expression)
    matched = [m for m in re.findall(r"\{([^{}]*)\}", expression) if m != "prefix"]
    return {x.strip() for group in by for x in group.split(",")} | {
        x for m in matched for x in re.findall(r"(\w+)[=!]", m)
    }


# -- what they speak of ------------------------------------------------------------------------------------------------


def test_the_dashboard_is_up_to_date(generator: ModuleType) -> None:
    assert dashboard() == generator.dashboard(), "run: python examples/monitoring/dashboard.py"


def test_the_generator_knows_metrics_and_labels(generator: ModuleType) -> None:
    with pytest.raises(KeyError):
        generator.rate("no_such")
    with pytest.raises(ValueError, match="is a gauge, no counter"):
        generator.rate("leases")
    with pytest.raises(ValueError, match="has no label tier: it has source"):
        generator.rate("hit_chunks", "tier")


def test_every_expression_reads_metrics_and_labels_that_there_are() -> None:
    shown = set()
    for title, expression in [*queries(), *alerts(), *(("page", query) for query in PAGE_QUERIES)]:
        names = metrics_of(expression)
        known = {label for name in names for label in METRICS[name].labels} | ADDED
        assert labels_of(expression) <= known, f"{title}: {labels_of(expression) - known}"
        shown |= names
    assert shown == set(METRICS), f"no panel shows {', '.join(sorted(set(METRICS) - shown))}"


def test_values_of_labels_are_documented_ones() -> None:
    checked = 0
    for _, expression in [*queries(), *alerts()]:
        for name in metrics_of(expression):
            for label, values in re.findall(r'(\w+)[=!]~?"([\w|]+)"', expression):
                if label in METRICS[name].labels:
                    documented = METRICS[name].labels[label]
                    for value in values.split("|"):
                        assert f"`{value}`" in documented, f"{name} has no {label} {value}"
                        checked += 1
    assert checked > 15


def test_legends_name_labels_of_their_queries() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels_of(target["expr"]), panel[
                "title"
            ]


def test_grafanas_own_types_know_every_field() -> None:
    """Read by them and written again, nothing is lost."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    given = dashboard()
    back = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))

    def lost(one: Any, other: Any, path: str) -> Iterator[str]:
        if isinstance(one, dict) and isinstance(other, dict):
            for key, value in one.items():
                yield from lost(value, other[key], f"{path}.{key}") if key in other else (f"{path}.{key}",)
        elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            for i, (a, b) in enumerate(zip(one, other, strict=True)):
                yield from lost(a, b, f"{path}[{i}]")
        elif one != other:
            yield path

    assert list(lost(given, back, "")) == []
    given["panels"][1]["fieldConfigs"] = given["panels"][1].pop("fieldConfig")  # the check sees a wrong name
    assert list(lost(given, json.loads(JSONEncoder().encode(Dashboard.from_json(given))), ""))


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    ids = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        ids.add(panel["id"])
    assert len(ids) == len(dashboard()["panels"])


def test_the_page_shows_what_is_there() -> None:
    """docs/monitoring.md: the configuration, every alert, and the commands."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.S | re.M)
    assert yaml.safe_load(block) == yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert re.findall(r"^\| `(Kvcore\w+)` \|", PAGE, re.M) == [rule["alert"] for rule in rules()]
    assert re.findall(r"^    (.*)$", PAGE.replace(block, ""), re.M) == [
        "python examples/monitoring/dashboard.py",
        *(f"promtool {' '.join(words)}" for words in PROMTOOL),
    ]
    assert len(PAGE_QUERIES) == 7


# -- Prometheus' own tools ---------------------------------------------------------------------------------------------


def test_promtool_accepts_the_rules_and_their_tests_hold() -> None:
    for words in PROMTOOL:
        done = subprocess.run(
            [tool("promtool"), *words], cwd=FOLDER, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout


def test_promtool_accepts_the_scrape_configuration_with_and_without_the_token(tmp_path: Path) -> None:
    plain = (FOLDER / "prometheus.yaml").read_text()
    token = plain.replace("    # authorization: # ", "    authorization: # ").replace("    #   cred", "      cred")
    assert plain != token
    config = yaml.safe_load(token)
    assert config["scrape_configs"][0]["authorization"] == {"credentials_file": "/etc/kvcore/http-token"}
    (tmp_path / "token").write_text("correct horse battery")
    config["scrape_configs"][0]["authorization"]["credentials_file"] = str(tmp_path / "token")
    (tmp_path / "alerts.yaml").write_bytes((FOLDER / "alerts.yaml").read_bytes())
    for text in (plain, yaml.safe_dump(config)):
        (tmp_path / "prometheus.yaml").write_text(text)
        words = [tool("promtool"), "check", "config", str(tmp_path / "prometheus.yaml")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_planted_in_a_test() -> None:
    tests = yaml.safe_load((FOLDER / "alerts.test.yaml").read_text())["tests"]
    fired = {case["alertname"] for t in tests for case in t["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules()}
    assert len(fired) >= 10


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real one, which has scraped every metric there is several times, and evaluated the alerts."""
    folder = tmp_path_factory.mktemp("prometheus")
    metrics = Metrics()
    for name, spec in METRICS.items():
        labels = [f"some {label}" for label in spec.labels]
        {"counter": metrics.add, "gauge": metrics.set, "histogram": metrics.observe}[spec.kind](name, 1, *labels)
    for side in ("in", "out"):
        metrics.add("serde_bytes", 1, "t", side)
    served = serve(metrics.registry, 0)
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    assert config["rule_files"] == ["alerts.yaml"]
    config["rule_files"] = [str(FOLDER / "alerts.yaml")]
    assert [c["job_name"] for c in config["scrape_configs"]] == ["kvcore", "vllm"]
    config["scrape_configs"] = config["scrape_configs"][:1]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{served.server_port}"]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = [
        "--config.file=prometheus.yaml",
        f"--web.listen-address=127.0.0.1:{port}",
        f"--storage.tsdb.path={folder}/data",
    ]

    def ready() -> bool:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=10) as answer:
            return bool(answer.status == 200)

    with Server("prometheus", [tool("prometheus"), *words], ready=ready, folder=folder):
        yield url
    served.shutdown()
    served.server_close()


def asked(url: str, path: str, **parameters: str) -> Any:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None


def test_every_panel_shows_something_in_a_real_prometheus(prometheus: str) -> None:
    chosen = {"${prefix}": "kvcore_", "$job": ".*", "$instance": ".*", "$__rate_interval": "1m"}
    waiting = dict(enumerate([*queries(), *(("docs/monitoring.md", query) for query in PAGE_QUERIES)]))
    give_up = time.monotonic() + DEADLINE_S
    while waiting:
        for i, (_, expression) in list(waiting.items()):
            for variable, value in chosen.items():
                expression = expression.replace(variable, value)
            if asked(prometheus, "query", query=expression)["result"]:
                del waiting[i]
        assert time.monotonic() < give_up, f"nothing in: {sorted(title for title, _ in waiting.values())}"
        time.sleep(0.2)


def test_prometheus_evaluates_every_rule(prometheus: str) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while True:
        found = {rule["name"]: rule for group in asked(prometheus, "rules")["groups"] for rule in group["rules"]}
        if all(rule["health"] != "unknown" for rule in found.values()):
            break
        assert time.monotonic() < give_up
        time.sleep(0.2)
    assert set(found) == {rule["alert"] for rule in rules()}
    assert {name: rule.get("lastError") for name, rule in found.items() if rule["health"] != "ok"} == {}
