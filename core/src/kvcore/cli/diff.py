"""`kvcore diff A B`: how much two prompts have in common, to the cache."""

import argparse
from functools import partial
from typing import TYPE_CHECKING

from kvcore.api.errors import ConfigError
from kvcore.cli.explain import lines
from kvcore.cli.kit import asking, prompts
from kvcore.cli.kit.output import print_json

if TYPE_CHECKING:
    from kvcore.explain.models import DiffModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvcore diff`."""
    for name in ("A", "B"):
        parser.add_argument(
            name.lower(), metavar=name,
            help="a request's id or a part of it, or its number in `kvcore explain`'s list (no.7) where its engine "
            "does not name it; or @FILE: a prompt's text or a JSON list of its token ids",
        )  # fmt: skip
    parser.add_argument("--text", action="store_true", help="A and B are the prompts themselves")
    parser.add_argument(
        "--chunk-tokens", metavar="N", type=int, help="tokens of a chunk (default: a running cache says so)"
    )
    prompts.add_tokenizer(parser)
    asking.add_caches(parser)
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """JSON: see `DiffModel`. Raises `ConfigError` when nobody knows a request."""
    from kvcore.explain.tell import diff

    if args.chunk_tokens is not None and args.chunk_tokens < 1:
        raise ConfigError(f"--chunk-tokens {args.chunk_tokens}: write a number of at least 1")
    prompt = {word: _prompt(word, args) for word in (args.a, args.b)}
    needs_cache = None in prompt.values() or args.chunk_tokens is None
    found = (_asked(args, prompt) if needs_cache else None) or _apart(args, prompt)
    if args.json:
        print_json(found.model_dump(mode="json"))
    else:
        model = args.model or (prompts.served(args) if found.here else None)
        lines(diff(found, prompts.Tokenizer(model).decode if model else None))
    return 0


def _prompt(word: str, args: argparse.Namespace) -> list[int] | None:
    """The tokens of a prompt; None for a request."""
    if args.text:
        return prompts.tokens(word, args)
    return prompts.tokens(prompts.read(word[1:]), args) if word.startswith("@") else None


def _asked(args: argparse.Namespace, prompt: "dict[str, list[int] | None]") -> "DiffModel | None":
    """What a cache says; None where there is none and it is not needed."""
    from kvcore.explain.models import DiffModel

    needed = None in prompt.values()
    body = {
        "a": _side(args.a, prompt),
        "b": _side(args.b, prompt),
        "model": prompts.Tokenizer(args.model).model if args.model else "",
    }
    try:
        read = partial(DiffModel.model_validate, strict=False)
        answers = asking.first_answers(asking.chosen(args), "/diff", body, read)
    except ConfigError:
        if needed or args.cache or args.url:
            raise
        return None
    return max((said for _, said in answers), key=lambda d: (d.chunks is not None, d.tokens is not None))


def _side(word: str, prompt: "dict[str, list[int] | None]") -> dict[str, object]:
    tokens = prompt[word]
    return {"request": word} if tokens is None else {"tokens": tokens}


def _apart(args: argparse.Namespace, prompt: "dict[str, list[int] | None]") -> "DiffModel":
    """Without a cache: token by token."""
    from kvcore.explain.compare import Two, told

    a, b = prompt[args.a] or [], prompt[args.b] or []
    return told(Two(("", ""), (len(a), len(b)), (a, b), args.chunk_tokens or 0))
