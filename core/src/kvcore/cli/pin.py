"""`kvcore pin`: a prefix stays in the L1 of running caches for a time."""

import argparse
import re
from typing import Any

from kvcore.api.errors import ConfigError
from kvcore.cli.kit import arguments, asking, prompts
from kvcore.cli.kit.output import error, print_json, printable

MAX_S = 30 * 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvcore pin`."""
    parser.epilog = "what is to be kept must be in L1: ask for it once; pins hold at most half of L1"
    parser.add_argument(
        "prefix", metavar="PREFIX", type=_prefix, nargs="?", help="as `kvcore top` shows it: 8 characters or more"
    )
    time = parser.add_mutually_exclusive_group(required=True)
    time.add_argument(
        "--for", dest="seconds", metavar="TIME", type=_time, help="from now on, such as 2h; 30d is the longest"
    )
    time.add_argument("--end", dest="seconds", action="store_const", const=0.0, help="keep it no longer")
    what = parser.add_argument_group("a prompt instead")
    what.add_argument("--prompt-file", metavar="FILE", help="its text, or a JSON list of token ids; - reads stdin")
    what.add_argument("--salt", metavar="SALT", type=arguments.word, default="", help="its requests' cache salt")
    what.add_argument(
        "--tenant", metavar="NAME", type=arguments.word, default="", help="whose it is, where the salt does not tell"
    )
    what.add_argument("--adapter", metavar="NAME=PATH", type=arguments.word, default="", help="its LoRA adapter")
    prompts.add_tokenizer(parser)
    parser.add_argument(
        "--namespace", metavar="NAMESPACE", type=arguments.namespace, help="of PREFIX, where several have it"
    )
    asking.add_caches(parser)
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """JSON: {caches: [{cache, namespace, model, tenant, chunks, chunk_tokens, pinned, ended, until, notes}]}. Status 1
    when not all of it is kept. Raises `ConfigError` when nobody has it."""
    if (args.prefix is None) == (args.prompt_file is None):
        raise ConfigError("give a PREFIX, as `kvcore top` shows it, or a prompt by --prompt-file")
    body: dict[str, Any] = {"prefix": args.prefix, "namespace": args.namespace or ""}
    if args.prompt_file is not None:
        body = {
            "tokens": prompts.tokens(prompts.read(args.prompt_file), args),
            "model": prompts.Tokenizer(args.model).model if args.model else "",
            "salt": args.salt,
            "tenant": args.tenant,
            "adapter": args.adapter,
        }
    else:
        prompts.none_given(args)
    found = asking.first_answers(asking.chosen(args), "/pin", {**body, "seconds": args.seconds}, _read, changes=True)
    if args.json:
        print_json({"caches": [{"cache": cache.label, **said} for cache, said in found]})
    else:
        for cache, said in found:
            print(printable(f"{cache.label}: {_told(said, args.seconds)}"), flush=True)
            for note in said.get("notes", ()):  # one of another release has none
                error(f"{cache.label}: {note}")
    return 0 if not args.seconds or all(said["pinned"] == said["chunks"] for _, said in found) else 1


def _read(said: Any) -> dict[str, Any]:
    _told(said, 1.0)  # one of another release may say it in other words
    return dict(said)


@arguments.argument
def _prefix(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{8,}", text):
        raise ValueError(f"{text!r:.80} is no prefix: 8 characters of [0-9a-f] or more, as `kvcore top` shows it")
    return text


@arguments.argument
def _time(text: str) -> float:
    seconds = arguments.duration(text)
    if not 0 < seconds <= MAX_S:
        raise ValueError(f"{text} is no time to keep it: write one above 0s, of at most 30d; --end ends it")
    return seconds


def _told(said: dict[str, Any], seconds: float) -> str:
    of = f"of {said['model']}" + (f", {said['tenant']}" if said["tenant"] else "")
    if not seconds and not said["ended"]:
        why = "there was no pin, or it has ended, with its time or because it was cleared"
        return f"none of {said['chunks']:,} chunks {of} was pinned: {why}"
    if not seconds:
        return f"{said['ended']:,} of {said['chunks']:,} chunks were pinned, and are no longer, {of}"
    kept = f"{said['pinned']:,} of {said['chunks']:,} chunks of {said['chunk_tokens']:,} tokens stay in L1"
    if said["pinned"] == said["chunks"]:
        return f"{kept} until {said['until'][:19]}Z, {of}"
    return f"{kept}, {of}: the others are not there (ask for the prompt once), or pins have no more room"
