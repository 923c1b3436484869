"""What is to be generated.

Owns: Submission (a prompt that asks to come in), Request (a sequence that may), their images.
Does not know: sampling, queues, text.
Invariants: frozen; in a Request everything is resolved: ids, seed, limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from numpy.typing import NDArray

from aengine.types.arrays import Int32s
from aengine.types.sampling import SamplingParams, TokenRules

NO_END = 2**31 - 1  # a visibility that lasts as long as the sequence


class MediaInput(msgspec.Struct, frozen=True):
    """One decoded and preprocessed image, wherever it may stand in a prompt.

    `digest`: SHA-256 of the decoded pixels, their size and mode, and the processor's settings. `tokens`: entries it has
    in item groups (cross-attention KV). `arrays`: what the model's vision tower takes, by name; read-only.
    """

    digest: bytes
    tokens: int
    arrays: Mapping[str, NDArray[Any]]

    @property
    def n_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class Submission(msgspec.Struct, frozen=True):
    """A prompt with all that came with it; nothing but the form of `prompt_ids` has been checked. `images`: one for
    each placeholder, in their order. `priority`: smaller runs earlier."""

    request_id: str
    prompt_ids: Int32s
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    images: tuple[MediaInput, ...] = ()


class RequestMedia(msgspec.Struct, frozen=True):
    """An image in a prompt: its placeholders are `position` .. `position + span - 1`, and the positions `position` <=
    p < `until` see it (NO_END: all later ones, output included)."""

    input: MediaInput
    position: int
    span: int = 1
    until: int = NO_END


class Request(msgspec.Struct, frozen=True):
    """One token sequence to generate (a request with n > 1 is n of these).

    `handle` is unique for the life of the engine and grows with arrival: it is the request's age. `prompt_ids` is
    int32 [prompt]. `max_total_tokens` bounds prompt plus output (already fitted to the context). `seed` is the
    resolved 64-bit seed. `priority`: smaller runs earlier. `cause` is how the prefix cache accounts its hits.
    """

    handle: int
    id: str
    prompt_ids: Int32s
    sampling: SamplingParams
    rules: TokenRules
    max_total_tokens: int
    seed: int
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    cause: str = "fresh"
    media: tuple[RequestMedia, ...] = ()  # by rising position
