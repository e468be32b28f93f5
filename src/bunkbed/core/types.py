"""Types that several folders use. `Any` is here only where a library, or the caller, decides the type."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy.typing as npt

#: An object of JSON. `json.loads` is untyped, and `meta` is the caller's: a reader checks the values it takes out.
Json: TypeAlias = dict[str, Any]
#: An array of any dtype.
Array: TypeAlias = npt.NDArray[Any]
