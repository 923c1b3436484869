"""Grammars: from what a client wrote to matchers and masks.

Owns: compiling off the loop, the cache of compiled grammars, the limits of both, the thread that makes masks.
Does not know: tokens' meaning, scheduling, HTTP.
Invariants: the loop never compiles and never makes a mask. What a grammar may cost is bounded: its length, its size
once compiled, the seconds until it is refused, the work of one mask. A matcher is used by one thread at a time: the
core waits for masks. Compiled grammars are never advanced, only copied. Copies share the lexer that they were copied
from, and its lock: masks of one family come one after the other, so a grammar is compiled once for each mask thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from aengine.engine.schema_check import checked_lark, checked_schema
from aengine.engine.schema_place import place_of
from aengine.engine.short_texts import ShortTexts, has_short_texts
from aengine.errors import (
    NOTHING_FOLLOWS,
    TOO_COMPLEX,
    GrammarTooComplex,
    InvalidGrammar,
    InvalidRequest,
    NotSupported,
)
from aengine.types import Grammar, Int32s

MAX_SOURCE_CHARS = 256 * 1024  # an enum of 20,000 strings; it takes a quarter of a second to compile
MAX_CHOICES = 16_384
COMPILE_S = 1.5
CACHED = 64
COMPILE_THREADS = 2
# Beside the thread that waits for them; 100 masks take about 2 ms on one, 12 ms where all are dear.
MASK_THREADS = max(2, min(4, (os.cpu_count() or 1) // 4))
FEW_MASKS = 12  # 7 took half the processor's time on one thread, and were there sooner
FAMILIES_S = 0.1  # a grammar that takes long to compile gets no more families behind this
Families = tuple["GrammarMatcher", ...]
"""The same grammar, compiled several times."""
# One mask: at most about 15 ms of lexing and 5 ms of parsing. A lexer state takes up to 2 kB. Accepting a token parses
# on the loop: with ten times the items an ambiguous grammar took 90 ms of it for each of its tokens.
_MAX_LEXER_STATES, _STEP_LEXER_FUEL, _STEP_MAX_ITEMS = 50_000, 200_000, 5_000
# As json.dumps writes it. Free white space would let a weak model go on with it for ever.
_JSON_FORM: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
# The library reads only objects; these say the same.
_BOOLEANS = {"true": "{}", "false": '{"enum": []}'}
_STUCK = "NoExtensionBias"  # the text may not end here, and no token continues it
_LIMITS = ("too big", "too complex", "too large", "too many", "limit", "max is")  # words of the library's refusals
_OUTSIDE = re.compile(r"Token range (?:start|end) too large: (\d+)")
_ENDS = ("NoExtension", _STUCK, "EndOfSentence")


class GrammarMatcher:
    """The `Matcher` of the scheduler on llguidance. `short`: the same grammar on the small vocabulary of ShortTexts,
    where that can make masks; it is `behind` by these tokens. After so many (`passed`) of them the output was, or was
    not, `within` a short text."""

    def __init__(self, matcher: LLMatcher, short: LLMatcher | None, family: int = 0) -> None:
        self.matcher = matcher
        self.short = short
        self.behind: list[int] = []
        self.passed = 0
        self.within = False
        self.family = family

    def copy(self, family: int) -> GrammarMatcher:
        return GrammarMatcher(self.matcher.deep_copy(), self.short and self.short.deep_copy(), family)

    @property
    def ended(self) -> bool:
        return self.matcher.is_stopped()

    @property
    def error(self) -> str | None:
        if not self.matcher.is_stopped() or self.matcher.stop_reason() in _ENDS:
            return None
        said = self.matcher.get_error() or self.matcher.stop_reason()
        if said.startswith(_STUCK):
            return NOTHING_FOLLOWS
        return f"{TOO_COMPLEX if _is_limit(said) else 'the grammar could not be followed'}: {_shown(said)}"

    def accept(self, token: int) -> bool:
        self.matcher.consume_token(token)
        if self.short is not None:
            self.behind.append(token)
        return not self.matcher.is_stopped()  # also when it is at fault

    def forced(self) -> Sequence[int]:
        tokens = self.matcher.compute_ff_tokens()
        if tokens:  # within a text many may come
            self.within, self.passed = False, len(self.behind)
        return tokens


class Grammars:
    """`vocabulary` makes the model's vocabulary, `short_texts` the small one; each is called once, in a thread, when
    first needed."""

    def __init__(self, vocabulary: Callable[[], LLTokenizer], short_texts: Callable[[], ShortTexts]) -> None:
        self._read_vocabulary = vocabulary
        self._vocabulary: LLTokenizer | None = None
        self._read_short_texts = short_texts
        self._short_texts: ShortTexts | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, Families] = OrderedDict()
        self._compiling: dict[bytes, asyncio.Future[Families]] = {}
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="aengine-grammar")
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="aengine-masks")
        self._executor = LLExecutor(MASK_THREADS)
        self._turn = 0  # the family of the next matcher

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._mask_thread.shutdown(wait=False, cancel_futures=True)

    # ---- compiling

    async def prepare(self, grammar: Grammar) -> None:
        """Compile `grammar` unless it is in the cache, where it is the last to be dropped. Raises InvalidGrammar or
        GrammarTooComplex."""
        digest = _digest(grammar)
        if digest in self._compiled:
            self._compiled.move_to_end(digest)
            return
        _check_size(grammar)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._ready)
        if digest not in self._compiling:
            future = loop.run_in_executor(self._threads, self._compile, grammar)
            self._compiling[digest] = future
            future.add_done_callback(lambda done: self._keep(digest, done))
        try:
            compiled = await asyncio.wait_for(asyncio.shield(self._compiling[digest]), COMPILE_S)
        except TimeoutError:
            raise GrammarTooComplex(f"the grammar took more than {COMPILE_S:g} s to compile", param="grammar") from None
        self._store(digest, compiled)

    def _keep(self, digest: bytes, done: asyncio.Future[Families]) -> None:
        del self._compiling[digest]
        if not done.cancelled() and done.exception() is None:
            self._store(digest, done.result())

    def _store(self, digest: bytes, compiled: Families) -> None:
        self._compiled[digest] = compiled
        self._compiled.move_to_end(digest)
        while len(self._compiled) > CACHED:
            self._compiled.popitem(last=False)

    def _ready(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._read_vocabulary()
                except Exception as error:  # whatever the library has against this vocabulary: the model serves without
                    message = f"this model's vocabulary cannot follow a grammar: {type(error).__name__}: {error}"
                    raise NotSupported(message[:300]) from error
            return self._vocabulary

    def _short(self) -> ShortTexts:
        with self._lock:
            if self._short_texts is None:
                self._short_texts = self._read_short_texts()
            return self._short_texts

    def _compile(self, grammar: Grammar) -> Families:
        source = _translated(grammar)
        short_texts = self._short() if has_short_texts(grammar) else None
        began_s = time.monotonic()
        families: list[GrammarMatcher] = []
        while len(families) < MASK_THREADS and (not families or time.monotonic() - began_s < FAMILIES_S):
            matcher = self._matcher(source)
            if not matcher.is_error():
                matcher.compute_bitmask()  # the first one is the dearest
            if matcher.is_error():
                raise self._refusal(grammar, matcher.get_error())
            short = None if short_texts is None else self._matcher(source, short_texts.vocabulary)
            families.append(GrammarMatcher(matcher, short))
        return tuple(families)

    def _matcher(self, source: str, vocabulary: LLTokenizer | None = None) -> LLMatcher:
        limits = LLParserLimits(
            step_lexer_fuel=_STEP_LEXER_FUEL,
            step_max_items=_STEP_MAX_ITEMS,
            max_items_in_row=_STEP_MAX_ITEMS,
            max_lexer_states=_MAX_LEXER_STATES,
            verbose_errors=False,
        )
        return LLMatcher(vocabulary or self._ready(), source, log_level=0, limits=limits)

    def _refusal(self, grammar: Grammar, message: str) -> InvalidRequest:
        if outside := _OUTSIDE.search(message):
            size = self._ready().vocab_size
            message = f"the grammar names token id {outside[1]}, not in [0, {size})"
            return InvalidGrammar(message, param="grammar")
        first = _shown(message)
        if _is_limit(message):
            return GrammarTooComplex(f"{TOO_COMPLEX}: {first}", param="grammar")
        place = ""
        if grammar.kind == "json_schema":
            place = place_of(json.loads(checked_schema(grammar.source)), message, self._schema_error)
        return InvalidGrammar(f"{place}: {first}" if place else first, param="grammar", place=place)

    def _schema_error(self, schema: Any) -> str:
        return self._matcher(_schema_grammar(json.dumps(schema))).get_error()

    # ---- following

    def matchers(self, grammar: Grammar, count: int) -> list[GrammarMatcher]:
        """`count` matchers of a grammar that was prepared."""
        compiled = self._compiled.get(_digest(grammar))
        if compiled is None:
            raise InvalidRequest("the grammar was not prepared: await engine.prepare(sampling) first", param="grammar")
        turns = range(self._turn, self._turn + count)
        self._turn += count
        return [compiled[turn % len(compiled)].copy(turn % MASK_THREADS) for turn in turns]

    async def make_masks(self, matchers: Sequence[Any]) -> Int32s:
        """int32 [n, W] as in `Choices`, of n GrammarMatchers."""
        return await asyncio.get_running_loop().run_in_executor(self._mask_thread, self._fill, matchers)

    def _fill(self, matchers: Sequence[GrammarMatcher]) -> Int32s:
        masks = np.empty((len(matchers), -(-self._ready().vocab_size // 32)), np.int32)
        work = sorted(enumerate(matchers), key=lambda row: row[1].family)  # each thread begins with a part of this
        if self._short_texts is not None:
            work = self._fill_short(self._short_texts, work, masks)
        if work:
            self._make([(one.matcher, row) for row, one in work], masks)
        return masks

    def _make(self, work: list[tuple[LLMatcher, int]], masks: Int32s) -> None:
        """The mask of each matcher, at its row. To wake threads for a few costs more than they save."""
        if len(work) > FEW_MASKS:
            fill_next_token_bitmask_par(self._executor, work, masks)
            return
        for matcher, row in work:
            fill_next_token_bitmask(matcher, masks, row)

    def _fill_short(
        self, texts: ShortTexts, work: list[tuple[int, GrammarMatcher]], masks: Int32s
    ) -> list[tuple[int, GrammarMatcher]]:
        """Make the masks of those that are within short texts; returns the others."""
        asked: list[tuple[LLMatcher, int]] = []
        for row, one in work:
            if one.short is not None and (one.within or texts.may_begin(one.behind[one.passed :])):
                one.short.consume_tokens(texts.spelt(one.behind))
                one.behind.clear()
                one.passed = 0
                asked.append((one.short, row))
        if not asked:
            return work
        small = np.zeros((len(masks), texts.words), np.int32)
        self._make(asked, small)
        rows, made = texts.whole(small)
        masks[rows] = made
        done = set(rows.tolist())
        for row, one in work:
            one.within = row in done
        return [(row, one) for row, one in work if not one.within]


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind}\0{grammar.source}".encode("utf-8", "surrogatepass")).digest()


def _check_size(grammar: Grammar) -> None:
    if len(grammar.source) > MAX_SOURCE_CHARS:
        raise GrammarTooComplex(
            f"the grammar has {len(grammar.source):,} characters; at most {MAX_SOURCE_CHARS:,} are accepted",
            param="grammar",
        )


def _translated(grammar: Grammar) -> str:
    """As llguidance reads it. Raises InvalidGrammar."""
    match grammar.kind:
        case "json_object":
            return _schema_grammar('{"type": "object"}')
        case "json_schema":
            return _schema_grammar(checked_schema(grammar.source))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, _choices(grammar.source))))
        case "lark":
            return LLMatcher.grammar_from_lark(checked_lark(_as_lark(grammar.source)))
    raise InvalidGrammar(f"no grammar is of kind {grammar.kind[:40]!r}", param="grammar")


def _schema_grammar(source: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(_BOOLEANS.get(source.strip(), source), overrides=_JSON_FORM)
    except ValueError as error:
        raise InvalidGrammar(f"the schema cannot be read: {_shown(str(error))}", param="grammar") from None


def _as_lark(source: str) -> str:
    """llama.cpp's GBNF is translated."""
    try:
        return any_to_lark(source)
    except Exception as error:  # the translator raises what its parser happens to
        raise InvalidGrammar(f"the grammar cannot be read: {_shown(str(error))}", param="grammar") from None


def _choices(source: str) -> list[str]:
    choices = json.loads(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise InvalidGrammar("choice is not a list of at least one text that is not empty", param="grammar")
    if len(choices) > MAX_CHOICES:
        raise GrammarTooComplex(f"{len(choices):,} choices; at most {MAX_CHOICES:,} are accepted", param="grammar")
    return choices


def _is_limit(message: str) -> bool:
    """Whether the library gave up for what a grammar costs; it tells so in words alone."""
    return any(words in message.lower() for words in _LIMITS)


def _shown(message: str) -> str:
    """One line of what the library says, at most 300 characters."""
    text = " ".join(message.replace("<non-verbose/>", "").split())[:300]
    return "no answer can satisfy it" if text in _ENDS else text
