"""A row of the result, and the budgets that rows are held to."""

from typing import Any, Literal, NamedTuple

Unit = Literal["us", "ms", "s", "GB/s", "1/s", "MiB", "x"]
"""us: microseconds per chunk or slot. ms: milliseconds per call. GB/s: 10^9 bytes per second. 1/s: calls per second. x:
bytes before divided by bytes after."""

SMALLER_IS_BETTER = ("us", "ms", "s", "MiB")


class Row(NamedTuple):
    """One measured row. Numbers are None when there is nothing to measure; `note` then says why."""

    name: str
    value: float | None
    unit: Unit
    limit: float | None = None
    ratio_to_limit: float | None = None
    peer: float | None = None
    ratio_to_peer: float | None = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """The row of `kvcore bench --json`; `note` stands only where it says something."""
        budget = BUDGETS.get(self.name)
        fields = {k: _short(v) for k, v in self._asdict().items()}
        fields["budget"] = budget.as_json() if budget else None
        fields["budget_met"] = budget.met(self) if budget else None
        if not self.note:
            del fields["note"]
        return fields


class Budget(NamedTuple):
    """What a row must reach: `of` names the number that `most` or `least` bounds."""

    of: Literal["value", "ratio_to_limit"]
    most: float | None = None
    least: float | None = None

    def met(self, row: Row) -> bool | None:
        """Whether `row` is within it; None when it was not measured."""
        number: float | None = getattr(row, self.of)
        if number is None:
            return None
        return (self.most is None or number <= self.most) and (self.least is None or number >= self.least)

    def as_json(self) -> dict[str, Any]:
        """`{of, most}` or `{of, least}`."""
        return {k: v for k, v in self._asdict().items() if v is not None}

    def __str__(self) -> str:
        sign, bound = ("<=", self.most) if self.most is not None else (">=", self.least)
        return f"{sign} {bound:g}" + (" /limit" if self.of == "ratio_to_limit" else "")


BUDGETS: dict[str, Budget] = {
    "keys.tokens_buffer": Budget("ratio_to_limit", most=1.37),  # 1.0 us where SHA-256 takes 0.73
    "keys.tokens_list": Budget("ratio_to_limit", most=1.16),  # 2.0 us where the list's conversion takes 1.0 more
    "keys.engine": Budget("value", most=0.1),
    "l1.lookup_hit": Budget("ratio_to_limit", most=2.0),  # 0.12 us where bare Python takes 0.06
    "l1.reserve_publish": Budget("ratio_to_limit", most=2.22),  # 0.4 us where bare Python takes 0.18
    "l1.alloc_free": Budget("value", most=0.2),
    "l1.alloc_free_mixed": Budget("value", most=0.5),
    "transfer.store": Budget("ratio_to_limit", least=0.85),
    "transfer.load": Budget("ratio_to_limit", least=0.85),
    "disk.store": Budget("ratio_to_limit", least=0.95),
    "disk.load": Budget("ratio_to_limit", least=0.95),
    "serde.zstd.ratio": Budget("value", least=1.45),
    "serde.zstd.encode": Budget("value", least=0.5),
    "serde.zstd.decode": Budget("ratio_to_limit", least=0.7),  # 2 GB/s where Zstandard alone has 2.8
    "import.seconds": Budget("value", most=0.15),
    "import.rss": Budget("value", most=60),
    "cli.help.seconds": Budget("value", most=0.15),
    "cli.help.rss": Budget("value", most=60),
    "server.ready": Budget("value", most=1.0),
    "server.idle_cpu": Budget("value", most=10.0),
    "server.rss": Budget("value", most=80),
    "server.rss_100k": Budget("value", most=80),
    "server.lookup_p50": Budget("value", most=0.2),
    "server.lookup_tail": Budget("ratio_to_limit", most=5.0),
    "server.lookups": Budget("value", least=5000),
    "server.lookups_8": Budget("ratio_to_limit", least=0.8),
    "server.lookups_64": Budget("ratio_to_limit", least=0.8),
    "server.lookup_10k": Budget("ratio_to_limit", most=1.25),
    "server.lookup_100k": Budget("ratio_to_limit", most=1.25),
    "server.lookup_1m": Budget("ratio_to_limit", most=1.25),
    "server.store": Budget("ratio_to_limit", least=0.85),
    "server.retrieve": Budget("ratio_to_limit", least=0.85),
}
"""What docs/performance.md holds the rows to. Rows that are not here are for orientation."""


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
