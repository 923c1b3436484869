"""What a stranger's configuration may claim.

Owns: the most layers, and the containment of whatever absurd values make a reader raise.
Does not know: what any value means.
Invariants: nothing is made in a number that a file names before that number was bounded; a file that cannot be read
ends in ModelLoadError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aengine.errors import ModelLoadError

MAX_LAYERS = 4096


def checked_layers(layers: int) -> int:
    if layers > MAX_LAYERS:
        raise ModelLoadError(f"the model says it has {layers} layers; at most {MAX_LAYERS} are believed")
    return layers


@contextmanager
def absurd_values(where: object) -> Iterator[None]:
    """Readers check what they rely on; what they did not think of is still the file's fault, and said so."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelLoadError(f"{where}: a value makes no sense: {type(error).__name__}: {error}"[:500]) from error
