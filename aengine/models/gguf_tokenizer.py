"""Building a tokenizer from GGUF metadata.

Owns: what GGUF's vocabulary kinds ("gpt2" byte-level BPE, "llama" SentencePiece BPE) and pre-tokenizer names mean.
Does not know: caching, chat templates, models.
Invariants: the same text gives the same ids as the tokenizer the file was made from. An unknown kind or pre-tokenizer
raises ModelLoadError: a guess would degrade every answer silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from aengine.errors import ModelLoadError
from aengine.models.gguf import GGUFFile, StringArray
from aengine.models.gguf_config import special_id

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # SentencePiece's visible space

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Pre-tokenizer name -> regexes applied one after another; each match is a piece of its own.
_SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (_GPT2,),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
_WHOLE_WORDS_FIRST = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "smaug-bpe",
    "tekken",
)  # a word in the vocabulary is not merged
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "tekken")


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises ModelLoadError when the file has no tokenizer or one of an unknown kind. Takes 0.2 to 5 s."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelLoadError(f"{file.path}: tokenizer {kind!r} is not supported; supported are 'gpt2', 'llama'")
    tokens = _strings(file, "tokens")
    types = _numbers(file, "token_type", len(tokens), NORMAL)
    if kind == "gpt2":
        tokenizer, pre = _byte_level(file, tokens)
        add_bos = pre in _BOS_BY_DEFAULT
    else:
        tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        tokenizer = _sentencepiece(file, tokens, types)
        add_bos = True
    _add_tokens(tokenizer, tokens, types)
    tokenizer.post_processor = _post_processor(file, tokens, add_bos)
    return tokenizer


def _strings(file: GGUFFile, name: str) -> list[str]:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, StringArray) or not len(value):
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.{name} is missing or not an array of strings")
    return list(value)


def _numbers(file: GGUFFile, name: str, count: int, default: float) -> list[Any]:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return [default] * count
    if not isinstance(value, np.ndarray) or len(value) != count:
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.{name} has not one number for each of {count:,} tokens")
    return list(value.tolist())


def _byte_level(file: GGUFFile, tokens: Sequence[str]) -> tuple[Tokenizer, str]:
    pre = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in _SPLITS:
        supported = ", ".join(_SPLITS)
        raise ModelLoadError(f"{file.path}: pre-tokenizer {pre!r} is not supported; supported are {supported}")
    merges = [_pair(merge) for merge in _strings(file, "merges")]
    model = BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
        ignore_merges=pre in _WHOLE_WORDS_FIRST,
    )
    tokenizer = Tokenizer(model)
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in _SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(file: GGUFFile, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores = _numbers(file, "scores", len(tokens), 0.0)
    unknown = special_id(file, "unknown")
    model = BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges(tokens, types, scores),
        unk_token=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    visible = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), visible]) if prefix else visible
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", left=1)] if prefix else steps)
    return tokenizer


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges a scored vocabulary implies: every split of a piece into two pieces, best piece first.

    User-defined pieces come before all others: SentencePiece gives them score 0, files give them anything.
    """
    usable = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER_DEFINED)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if len(token) > 1 and kind in (NORMAL, USER_DEFINED):
            rank = -score if kind == NORMAL else float("-inf")
            for cut in range(1, len(token)):
                left = token[:cut]
                if left in usable and token[cut:] in usable:
                    found.append((rank, -cut, cut - len(token), left, token[cut:]))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens are special; user-defined ones are matched whole but shown. Runs of spaces are left to merges."""
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, kind in zip(tokens, types, strict=True)
            if kind == wanted and token.strip(SPACE)
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _post_processor(file: GGUFFile, tokens: Sequence[str], add_bos: bool) -> Any:
    """Puts BOS before and EOS after a text, as the file asks."""
    bos = _wanted(file, tokens, "bos", add_bos)
    eos = _wanted(file, tokens, "eos", False)
    single = [f"{bos[0]}:0"] if bos else []
    single += ["$A:0"] + ([f"{eos[0]}:0"] if eos else [])
    specials = [token for token in (bos, eos) if token]
    pair = single + [part.replace(":0", ":1").replace("$A", "$B") for part in single]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)


def _wanted(file: GGUFFile, tokens: Sequence[str], kind: str, default: bool) -> tuple[str, int] | None:
    token = special_id(file, kind)
    if token is None or token >= len(tokens):
        return None
    return (tokens[token], token) if file.metadata.get(f"tokenizer.ggml.add_{kind}_token", default) else None
