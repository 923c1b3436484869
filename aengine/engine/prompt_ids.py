"""The tokens of a prompt, in whatever form a program gives them.

Owns: their form: one list of integers, of a length that the context can hold.
Does not know: vocabularies, text.
Invariants: what leaves here is int32 and read-only, and no id has become another one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aengine.errors import ContextLengthExceeded, InvalidRequest
from aengine.types import Int32s

INT32 = np.iinfo(np.int32)


def checked_ids(prompt_ids: Sequence[int] | Int32s, limit: int) -> Int32s:
    """`limit`: the model's context length, which must also hold an output token. Raises InvalidRequest or
    ContextLengthExceeded."""
    if len(prompt_ids) == 0:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if len(prompt_ids) >= limit:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt_ids)} tokens; this model's maximum context length is {limit} tokens, "
            "which must also hold at least one output token",
            param="prompt",
        )
    try:
        given = np.asarray(prompt_ids)
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidRequest("prompt token ids are not a list of integers", param="prompt") from error
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InvalidRequest(
            f"prompt token ids are {given.ndim}-dimensional {given.dtype}, not one list of integers", param="prompt"
        )
    beyond = given[(given < INT32.min) | (given > INT32.max)]
    if len(beyond):
        raise InvalidRequest(f"prompt holds token id {beyond[0]}, which is no integer of 32 bits", param="prompt")
    ids = given.astype(np.int32)
    ids.flags.writeable = False
    return ids
