"""Fields that restrict the output and that nothing here can enforce yet.

Owns: their names, and the refusal.
Does not know: the schemas; it sees only the raw top-level fields.
Invariants: a constraint is honoured or refused by name, never dropped: a client that asked for JSON must not get prose.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aengine.errors import InvalidRequest

_EMPTY = frozenset((b"null", b"false", b"[]", b"{}", b'""'))

_GRAMMAR = "this form is not available on this server; send structured_outputs"
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend")
_REFUSED = {
    "structural_tag": _GRAMMAR,
    "json_schema": _GRAMMAR,
    "grammar": _GRAMMAR,
    "regex": _GRAMMAR,
    "ebnf": _GRAMMAR,
    "logits_processors": "custom logits processors are not available on this server",
    "logit_processors": "custom logits processors are not available on this server",
    "custom_logit_processor": "custom logits processors are not available on this server",
    "use_beam_search": "beam search is not available on this server",
    "prompt_embeds": "prompts as embeddings are not available on this server",
    "functions": "functions is the retired form of tools; send tools",
    "audio": "this server answers in text only",
    "web_search_options": "web search is not available on this server",
}


def refuse_constraints(fields: Mapping[str, msgspec.Raw]) -> None:
    """Raises InvalidRequest for the first field that asks for one of these. Null, false and empty ask nothing."""
    for name, raw in fields.items():
        unknown = name.startswith("guided_") and name not in _GUIDED
        reason = _GRAMMAR if unknown else _REFUSED.get(name)
        if reason is not None and bytes(raw).strip() not in _EMPTY:
            raise InvalidRequest(f"{name}: {reason}", param=name)
