"""`kvcore explain`: why a prompt was, or was not, found, and what that saved."""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcore.api.errors import ConfigError
from kvcore.cli.kit import arguments, asking, prompts
from kvcore.cli.kit.output import cut, paint, print_json, printable, table

if TYPE_CHECKING:
    from kvcore.explain.models import Explanation
    from kvcore.explain.tell import Decode

LISTED = 20
LEGEND = """\
OWN: chunks that the engine had itself, FOUND: those that the cache had beyond
ENDED BY: why the next chunk was not had (absent: by nobody); more says kvcore explain REQUEST"""
MAX_ID = 64
"""Characters of an id in the list."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvcore explain`."""
    parser.epilog = "without a request or a prompt, the latest requests are listed"
    parser.add_argument(
        "request", metavar="REQUEST", nargs="?",
        help="a request's id as the engine's answer has it, or part of it; where it has none, its number in the "
        "list; `last`: the latest",
    )  # fmt: skip
    what = parser.add_argument_group("a prompt instead: what a lookup would find now")
    one = what.add_mutually_exclusive_group()
    one.add_argument("--prompt", metavar="TEXT", help="its text")
    one.add_argument("--prompt-file", metavar="FILE", help="its text, or a JSON list of token ids; - reads stdin")
    what.add_argument("--salt", metavar="SALT", type=arguments.word, default="", help="the request's cache salt")
    what.add_argument(
        "--tenant", metavar="NAME", type=arguments.word, default="",
        help="whose request it is, where the salt does not tell",
    )  # fmt: skip
    what.add_argument("--adapter", metavar="NAME=PATH", type=arguments.word, default="", help="its LoRA adapter")
    prompts.add_tokenizer(parser)
    asking.add_caches(parser)
    parser.add_argument("--all", action="store_true", help="every lookup of the request, not only the latest")
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """JSON: {explanations: [...], more: [ids]}, or {requests: [...]} for the list. Raises `ConfigError` when nobody
    knows the request."""
    given = args.prompt is not None or args.prompt_file is not None
    if given and args.request is not None:
        raise ConfigError("give a request or a prompt, not both")
    if not given:
        prompts.none_given(args)
    asked = asking.chosen(args)
    if given:
        prompt = args.prompt if args.prompt_file is None else prompts.read(args.prompt_file)
        body = {
            "tokens": prompts.tokens(prompt, args),
            "model": prompts.Tokenizer(args.model).model if args.model else "",
            "salt": args.salt,
            "tenant": args.tenant,
            "adapter": args.adapter,
        }
        return _show(args, asked, "/explain", body)
    if args.request is None:
        return _list(args, asked)
    if args.request == "last":
        asked, args.request = _last(asked)
    return _show(args, asked, asking.query("/explain", request=args.request))


def _show(args: argparse.Namespace, asked: list[Any], path: str, body: Any = None) -> int:
    """A request to a server is on record in its engine, too: only the best answer to a request is shown."""
    from kvcore.explain.models import Explanations
    from kvcore.explain.tell import explanation

    found = asking.first_answers(asked, path, body, partial(Explanations.model_validate, strict=False))
    found.sort(key=lambda entry: _worth(entry[1].explanations[0], args.request or ""))
    if args.request is not None and not args.all:
        found = found[:1]
    elif (
        args.request is None and args.model
    ):  # what one cache has is not to be lost among others that have another model
        model = prompts.Tokenizer(args.model).model
        found = [entry for entry in found if entry[1].explanations[0].model == model] or found
    if args.json:
        whole = Explanations(
            explanations=[e for _, said in found for e in said.explanations], more=[m for _, s in found for m in s.more]
        )
        print_json(whole.model_dump(mode="json"))
        return 0
    decode = _decoder(args, [e for _, said in found for e in said.explanations])
    for n, (_, said) in enumerate(found):
        shown = said.explanations if args.all else said.explanations[:1]
        for m, one in enumerate(shown):
            if n or m:
                print()
            lines(explanation(one, decode))
        if len(shown) < len(said.explanations):
            lines([("note", f"it was looked up {len(said.explanations)} times: --all shows each")])
        if said.more:
            lines([("note", f"{len(said.more)} more requests have ids like it: {', '.join(said.more[:5])}")])
    return 0


def _decoder(args: argparse.Namespace, shown: "list[Explanation]") -> "Decode | None":
    """What makes text of token ids, where some are shown."""
    model = args.model
    if model is None and any(one.nearest is not None and one.nearest.tokens is not None for one in shown):
        model = prompts.served(args)
    return prompts.Tokenizer(model).decode if model else None


def _worth(said: "Explanation", request: str) -> tuple[bool, int, bool]:
    """The very request first; then who can say most of why, such as an engine that has token ids where its server has
    none; then who knows what became of objects."""
    reason = said.broke.reason if said.broke is not None else ""
    by_hashes = reason == "differs" and (said.nearest is None or said.nearest.tokens is None)
    vague = 2 if reason in _VAGUE else int(by_hashes)
    return said.request != request, vague, said.record.objects_since is None


_VAGUE = ("absent", "never_stored", "unknown")


def lines(told: list[tuple[str, str]]) -> None:
    """What each line is about, and the line."""
    for about, text in told:
        print(f"{paint(f'{about:<8}', 'bold')} {printable(text)}")


def _list(args: argparse.Namespace, asked: list[Any]) -> int:
    rows: list[dict[str, Any]] = []
    for cache, said in _recorded(asked, LISTED):
        rows += [{"cache": cache.label, **r} for r in said]
    rows = sorted(rows, key=lambda r: str(r["at"]))[-LISTED:]
    if args.json:
        print_json({"requests": rows})
    elif not rows:
        print("no request is on record yet")
    else:
        table(
            ("AT", "REQUEST", "TOKENS", "CHUNKS", "OWN", "FOUND", "ENDED BY", "CACHE"),
            [_row(r) for r in rows],
        )
        print(paint(LEGEND, "dim"))
    return 0


def _recorded(asked: list[Any], limit: int) -> list[tuple[Any, list[dict[str, Any]]]]:
    """The latest requests of each cache."""

    def read(said: Any) -> list[dict[str, Any]]:
        for r in said["requests"]:
            _row({"cache": "", **r})  # one of another release may tell less
        return list(said["requests"])

    return asking.first_answers(asked, f"/requests?limit={limit}", read=read)


def _row(r: dict[str, Any]) -> list[str]:
    answer = r["first"] if r["answer"] is None else r["answer"]
    ended = r["broke"] or ("shorter than a chunk" if not r["chunks"] else "-")
    counts = (r["tokens"], r["chunks"], r["first"], answer - r["first"])
    return [str(r["at"])[11:19], cut(_name(r), MAX_ID), *map(str, counts), ended, r["cache"]]


def _name(r: dict[str, Any]) -> str:
    """As a request is asked for: its id, or the number of the lookup where the engine names none."""
    return str(r["id"]) or f"no.{r['seq']}"


def _last(asked: list[Any]) -> tuple[list[Any], str]:
    """The latest, and whom to ask: numbers are each cache's own."""
    found = _recorded(asked, 1)
    rows = [(str(r["at"]), n, r) for n, (_, said) in enumerate(found) for r in said]
    if not rows:
        raise ConfigError("no request is on record yet")
    _, n, latest = max(rows, key=lambda row: row[0])
    return asked if latest["id"] else [found[n][0]], _name(latest)
