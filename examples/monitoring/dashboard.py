"""Writes dashboard.json, for Grafana, out of the list of kvcore's metrics.

    python examples/monitoring/dashboard.py           write it
    python examples/monitoring/dashboard.py --check   status 1 when it is out of date

Every query is made by `rate`, `gauge`, `mean` or `quantile`, which know the metrics and their labels.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from kvcore.observe import METRICS

FILE = Path(__file__).with_name("dashboard.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WHERE = 'job=~"$job", instance=~"$instance"'
PREFIXES = {"kvcore's own": "kvcore_", "vLLM": "vllm:kvcore_", "SGLang": "sglang:kvcore_"}
"""The same numbers by whose `/metrics` they are read from."""
COLUMNS = 24
HEIGHT = 8


class Panel(NamedTuple):
    """One panel: its queries by legend, the unit as Grafana names it, and what to know about it."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    text: str = ""
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    thresholds: tuple[tuple[float | None, str], ...] = ()


# -- queries -----------------------------------------------------------------------------------------------------------


def _name(metric: str, kind: str, by: tuple[str, ...]) -> str:
    spec = METRICS[metric]
    if spec.kind != kind:
        raise ValueError(f"{metric} is a {spec.kind}, no {kind}")
    if unknown := set(by) - set(spec.labels) - {"instance"}:
        raise ValueError(
            f"{metric} has no label {', '.join(sorted(unknown))}: it has {', '.join(spec.labels) or 'none'}"
        )
    return "${prefix}" + metric


def _sum(expression: str, by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def rate(metric: str, *by: str, where: str = "") -> str:
    """How much of a counter came in a second, summed up but for the labels `by`."""
    return _sum(f"rate({_name(metric, 'counter', by)}_total{{{WHERE}{where}}}[$__rate_interval])", by)


def gauge(metric: str, *by: str, where: str = "") -> str:
    """A gauge, summed up but for the labels `by`."""
    return _sum(f"{_name(metric, 'gauge', by)}{{{WHERE}{where}}}", by)


def mean(metric: str, *by: str) -> str:
    """The mean of a histogram. An engine's own `/metrics` has its sum and count as counters, whose names end so."""
    total, count = (
        _sum(f'rate({{__name__=~"{_name(metric, "histogram", by)}_{part}(_total)?", {WHERE}}}[$__rate_interval])', by)
        for part in ("sum", "count")
    )
    return f"{total} / {count}"


def quantile(q: float, metric: str, *by: str) -> str:
    """A quantile of a histogram."""
    buckets = f"rate({_name(metric, 'histogram', by)}_bucket{{{WHERE}}}[$__rate_interval])"
    return f"histogram_quantile({q}, {_sum(buckets, ('le', *by))})"


# -- panels ------------------------------------------------------------------------------------------------------------

IN, OUT = (f', side="{side}"' for side in ("in", "out"))
FULL = " / ".join(gauge(f"tier_{what}_bytes", "tier", "instance") for what in ("used", "capacity"))
WRONG = ', outcome!~"ok|missing"'
OWN = "Only in kvcore's own metrics: engines' hold no buckets"
ROWS: dict[str, list[Panel]] = {
    "What it saves": [
        Panel(
            "Chunks found",
            {"found": f"{rate('hit_chunks')} / {rate('lookup_chunks')}"},
            "percentunit",
            "Of the chunks asked for. What is usual depends on the traffic",
            "stat",
            6,
        ),
        Panel("Tokens not computed again", {"tokens a second": rate("hit_tokens")}, "short", "", "stat", 6),
        Panel(
            "Engines' time saved",
            {"engines": rate("saved_prefill_seconds")},
            "short",
            "Seconds of prefill a second, as estimated: 2 means that two engines would have had to compute all the "
            "time what was found. Nothing where an engine does not say how fast it computes",
            "stat",
            6,
        ),
        Panel(
            "Tiers left alone",
            {"tiers": f"count({gauge('tier_open', 'instance', 'tier')} == 0) or vector(0)"},
            "short",
            "Circuit breakers that are open, or stores that have not been there yet",
            "stat",
            6,
            thresholds=((None, "green"), (1, "red")),
        ),
        Panel("Chunks found, by place", {"{{source}}": rate("hit_chunks", "source")}, "ops", stacked=True),
        Panel(
            "Chunks not found, by reason",
            {"{{reason}}": rate("miss_chunks", "reason")},
            "ops",
            "`absent` is what nobody has stored, or was evicted; the others have a remedy: see Operations",
            stacked=True,
        ),
        Panel("Tokens saved, by place", {"{{source}}": rate("saved_tokens", "source")}, "short", stacked=True),
        Panel(
            "Prefill saved, by place",
            {"{{source}}": rate("saved_prefill_seconds", "source")},
            "short",
            "Seconds a second, as estimated",
            stacked=True,
        ),
        Panel(
            "Prefill speed",
            {"{{instance}}": gauge("prefill_tokens_per_second", "instance")},
            "short",
            "Tokens a second",
        ),
        Panel("Lookups", {"lookups": rate("lookups"), "chunks": rate("lookup_chunks")}, "ops"),
    ],
    "How long it takes": [
        Panel(
            "Lookup, quantiles",
            {f"p{round(q * 100)}": quantile(q, "lookup_seconds") for q in (0.5, 0.9, 0.99)},
            "s",
            OWN,
        ),
        Panel("Lookup, mean", {"{{instance}}": mean("lookup_seconds", "instance")}, "s"),
        Panel("A batch through a tier, mean", {"{{tier}} {{op}}": mean("tier_seconds", "tier", "op")}, "s"),
        Panel(
            "A batch through a tier, p99", {"{{tier}} {{op}}": quantile(0.99, "tier_seconds", "tier", "op")}, "s", OWN
        ),
        Panel("Wait for a tier, mean", {"{{tier}} {{op}}": mean("tier_wait_seconds", "tier", "op")}, "s"),
        Panel("Wait for a tier, p99", {"{{tier}} {{op}}": quantile(0.99, "tier_wait_seconds", "tier", "op")}, "s", OWN),
    ],
    "Tiers": [
        Panel("Bandwidth in use", {"{{tier}} {{op}}": rate("tier_bytes", "tier", "op")}, "Bps"),
        Panel("Load speed, as estimated", {"{{tier}}": gauge("tier_load_bytes_per_second", "tier", "instance")}, "Bps"),
        Panel("Load latency, as estimated", {"{{tier}}": gauge("tier_load_latency_seconds", "tier", "instance")}, "s"),
        Panel("Objects loaded and stored", {"{{tier}} {{op}}": rate("tier_operations", "tier", "op")}, "ops"),
        Panel(
            "What went wrong",
            {"{{tier}} {{op}} {{outcome}}": rate("tier_operations", "tier", "op", "outcome", where=WRONG)},
            "ops",
        ),
        Panel(
            "Used (1) or left alone (0)",
            {"{{instance}} {{tier}}": gauge("tier_open", "instance", "tier")},
            "short",
            kind="state-timeline",
            thresholds=((None, "red"), (1, "green")),
        ),
        Panel("Circuit breakers opened", {"{{tier}}": rate("tier_opened", "tier")}, "ops"),
        Panel(
            "Held", {"{{tier}}": gauge("tier_used_bytes", "tier", "instance")}, "bytes", METRICS["tier_used_bytes"].help
        ),
        Panel(
            "How full",
            {"{{tier}}": FULL},
            "percentunit",
        ),
        Panel("Waiting to be written", {"{{tier}}": gauge("tier_queue_bytes", "tier")}, "bytes"),
        Panel("Not written, by reason", {"{{tier}} {{reason}}": rate("tier_dropped", "tier", "reason")}, "ops"),
        Panel("Held back by `write: reused`", {"{{tier}}": rate("tier_held_back", "tier")}, "ops"),
        Panel("Copied to an earlier tier", {"{{tier}}": rate("tier_promoted", "tier")}, "ops"),
        Panel(
            "Encoded size",
            {"{{tier}}": f"{rate('serde_bytes', 'tier', where=OUT)} / {rate('serde_bytes', 'tier', where=IN)}"},
            "percentunit",
            "Of what was given to the serdes",
        ),
    ],
    "L1 and evictions": [
        Panel("L1", {"{{instance}} {{state}}": gauge("l1_bytes", "instance", "state")}, "bytes"),
        Panel("Objects in L1", {"{{instance}}": gauge("l1_objects", "instance")}),
        Panel("Leases", {"{{instance}}": gauge("leases", "instance")}),
        Panel("Stored in L1", {"stored": rate("stored_chunks")}, "ops"),
        Panel("Not stored in L1, by reason", {"{{reason}}": rate("store_skipped_chunks", "reason")}, "ops"),
        Panel("Leases that ran out", {"{{kind}}": rate("expired_leases", "kind")}, "ops"),
        Panel(
            "Evictions by place and policy",
            {"{{place}} {{policy}}": rate("evictions", "place", "policy")},
            "ops",
            stacked=True,
        ),
        Panel("Evictions by tenant", {"{{tenant}}": rate("evictions", "tenant")}, "ops", stacked=True),
        Panel(
            "Deleted",
            {
                "l1 evicted": rate("evicted_objects"),
                "{{tier}} over capacity": rate("tier_evicted", "tier"),
                "{{place}} ttl": rate("expired_objects", "place"),
            },
            "ops",
        ),
    ],
    "Tenants": [
        Panel("Held by tenant", {"{{place}} {{tenant}}": gauge("tenant_bytes", "place", "tenant")}, "bytes", width=12),
        Panel(
            "What a tenant can rely on",
            {"{{place}} {{tenant}}": gauge("tenant_share_bytes", "place", "tenant")},
            "bytes",
            width=12,
        ),
    ],
    "Loads ahead of requests": [
        Panel("Objects", {"{{cause}} {{became}}": rate("prefetch_objects", "cause", "became")}, "ops", width=12),
        Panel("Not loaded", {"{{cause}} {{reason}}": rate("prefetch_skipped", "cause", "reason")}, "ops", width=12),
    ],
    "Server": [
        Panel("Engines connected to a server", {"{{instance}}": gauge("sessions", "instance")}),
        Panel(
            "Connected to its server (1)",
            {"{{instance}}": gauge("server_up", "instance")},
            "short",
            kind="state-timeline",
            thresholds=((None, "red"), (1, "green")),
        ),
        Panel("Server lost, by reason", {"{{reason}}": rate("server_lost", "reason")}, "ops"),
        Panel("Connections refused", {"{{reason}}": rate("refused_connections", "reason")}, "ops"),
        Panel(
            "Programs beside the server",
            {"{{instance}} {{helper}}": gauge("helper_up", "instance", "helper")},
            "short",
            kind="state-timeline",
            thresholds=((None, "red"), (1, "green")),
        ),
        Panel("Their starts", {"{{helper}}": rate("helper_starts", "helper")}, "ops"),
    ],
}


# -- the file ----------------------------------------------------------------------------------------------------------


def dashboard() -> dict[str, Any]:
    """The whole of it, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            }
        )  # fmt: skip
        x, y = 0, y + 1
        for i, panel in enumerate(row):
            if x + panel.width > COLUMNS or (i and row[i - 1].kind == "stat" != panel.kind):
                x, y = 0, y + (4 if row[i - 1].kind == "stat" else HEIGHT)
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x += panel.width
        y += HEIGHT
    return {
        "uid": "kvcore",
        "title": "kvcore",
        "description": "The KV cache of LLM engines: what it saves, how long it takes, its tiers and its tenants",
        "tags": ["kvcore", "llm", "cache"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": 38,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.thresholds:
        steps = [{"color": colour, "value": value} for value, colour in panel.thresholds]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"fillOpacity": 20 if panel.stacked else 5, "showPoints": "never", "stacking": stacking}
    out: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": 4 if panel.kind == "stat" else HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(panel.queries.items())
        ],
    }
    if panel.text:
        out["description"] = panel.text
    return out


def _variables() -> list[dict[str, Any]]:
    """What is chosen at the top: the data source, whose metrics, and of which jobs and instances."""
    options = [{"text": text, "value": value, "selected": value == "kvcore_"} for text, value in PREFIXES.items()]
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "label": "Data source", "query": "prometheus"},
        {
            "name": "prefix",
            "type": "custom",
            "label": "Metrics",
            "query": ", ".join(f"{text} : {value}" for text, value in PREFIXES.items()),
            "options": options,
            "current": options[0],
        },
    ]
    known = "${prefix}lookups_total"
    for name, query in (
        ("job", f"label_values({known}, job)"),
        ("instance", f'label_values({known}{{job=~"$job"}}, instance)'),
    ):
        variables.append(
            {
                "name": name, "type": "query", "label": name.capitalize(), "datasource": SOURCE, "query": query,
                "refresh": 2, "multi": True, "includeAll": True, "allValue": ".*",
                "current": {"text": "All", "value": "$__all", "selected": True},
            }
        )  # fmt: skip
    return variables


def main() -> int:
    """Write the file, or look whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when it is out of date")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if parser.parse_args().check:
        return int(not FILE.is_file() or FILE.read_text() != text)
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
