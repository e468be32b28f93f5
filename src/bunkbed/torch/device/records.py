"""Records of a device cache in one tensor: weights and optimizer state of a row together.

The tensor is int32[frames, record bytes / 4]; fields are views of it, in the layout of FORMAT.md, "Records". The host
knows which row is in which frame (`_native.DeviceMap`); methods take frames as int64 tensors on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bunkbed.core import optim
from bunkbed.torch.device.base import capabilities
from bunkbed.torch.device.base.rounding import round_rows
from bunkbed.torch.device.base.update_rules import StepConstants, update_rows
from bunkbed.torch.device.kernels.choice import chooser
from bunkbed.torch.device.kernels.operations import Gather, Scatter, update_of

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DeviceRecords:
    """Frames of records on one device. Owns their memory, and does not know ids. Not thread-safe.

    Args:
        frames: the number of records.
        fields: (name, length) of the weights and of each slot, in record order.
        dtype: of the weights: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        state_dtype: of the slots: ``"float32"`` or ``"bfloat16"``.
        device: the device of the records.
    """

    def __init__(
        self, frames: int, fields: list[tuple[str, int]], dtype: str, state_dtype: str, device: torch.device
    ) -> None:
        self.frames = frames
        self._dtypes = [dtype, *[state_dtype] * (len(fields) - 1)]
        starts, at = [], 0
        for (_, length), kind in zip(fields, self._dtypes, strict=True):
            starts.append(at)
            at += (length * _DTYPES[kind].itemsize + 3) // 4  # a field begins at a multiple of 4 bytes
        self.words = at
        self._views = []
        # The first lookup may run in inference mode (Lightning's check before training does). A step could not write
        # to a tensor that was made in inference mode.
        with torch.inference_mode(False):
            self._raw = torch.empty((frames, self.words), dtype=torch.int32, device=device)
            for (_, length), kind, start in zip(fields, self._dtypes, starts, strict=True):
                wide = self._raw.view(_DTYPES[kind])
                begin = start * 4 // _DTYPES[kind].itemsize
                self._views.append(wide[:, begin : begin + length])

    @property
    def device(self) -> torch.device:
        """The device of the records."""
        return self._raw.device

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return int(self._raw.nbytes)

    def read(self, frames: Tensor) -> Tensor:
        """Return whole records, int32[n, words]."""
        return chooser.run(Gather(self.words, self.words, torch.int32), self._raw, frames)

    def write(self, frames: Tensor, records: Tensor) -> None:
        """Write whole records, int32[n, words], into distinct frames."""
        chooser.run(Scatter(self.words), self._raw, frames, records)

    def weights(self, frames: Tensor) -> Tensor:
        """Return float32[n, dim] weights, widened exactly; frames may repeat."""
        view = self._views[0]
        if self._dtypes[0] == "float32":
            return chooser.run(Gather(self.words, view.shape[1], torch.float32), view, frames)
        return view.index_select(0, frames).to(torch.float32)

    def stepped(
        self,
        optimizer: optim.Optimizer,
        constants: StepConstants,
        frames: Tensor,
        grads: Tensor,
        *,
        seed: int,
        ids: Tensor,
        number: int,
    ) -> Tensor:
        """Return the records of distinct frames after one optimizer step, for `store`; this changes no frame.

        Args:
            optimizer, constants: of this step.
            frames: int64[U].
            grads: float32[U, dim], summed.
            seed, ids, number: the key of the rounding of 16-bit fields: the table's seed, int64[U] ids (None unless
                `is_narrow`), the step's number.
        """
        step = None if self.is_narrow else update_of(optimizer, self._views[0].shape[1])
        if step is not None:
            return chooser.run(step, self._raw, frames, grads, constants)
        fields = [view.index_select(0, frames).to(torch.float32) for view in self._views]
        weight, slots = update_rows(optimizer, constants, grads, fields[0], fields[1:])
        new = []
        for field, (values, kind) in enumerate(zip([weight, *slots], self._dtypes, strict=True)):
            if kind != "float32":
                # The host rounds for a device with wrong integer operations: slower, but the same bits.
                there = values.device if capabilities.of(values.device).has_integers else torch.device("cpu")
                halves = round_rows(kind, values.to(there), seed=seed, ids=ids.to(there), number=number, field=field)
                values = halves.to(values.device).view(_DTYPES[kind])
            new.append(values)
        return new

    def store(self, frames: Tensor, new: Tensor) -> None:
        """Write the result of `stepped` into the same frames: whole records, or field by field."""
        if isinstance(new, torch.Tensor):
            self.write(frames, new)
            return
        for view, values in zip(self._views, new, strict=True):
            view.index_copy_(0, frames, values)

    @property
    def is_narrow(self) -> bool:
        """Whether any field is stored in 16 bits."""
        return any(kind != "float32" for kind in self._dtypes)
