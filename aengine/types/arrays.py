"""Columns as they cross borders.

Owns: the names of array types.
Does not know: what the columns mean.
Invariants: dtypes only; shapes stand where a column is described.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


Int64s = NDArray[np.int64]


Float32s = NDArray[np.float32]


Bools = NDArray[np.bool_]
