"""Names for types of torch that its public interface does not name. For mypy every type of torch is `Any`."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

#: The `ctx` of a `torch.autograd.Function`: torch declares none of the attributes that forward may set.
Context: TypeAlias = Any
#: The argument `device` of a layer; None is the CPU.
Device: TypeAlias = torch.device | str | int | None
#: The batch of a `bunkbed.torch.base.gradients.Rows`, which gives it and takes it back: the core's, or a `DeviceBatch`.
RowsBatch: TypeAlias = Any
#: A stream or an event of a device's module, such as `torch.cuda`, or that module.
DeviceHandle: TypeAlias = Any
