// Rows that two batches have in common. After an update of one batch, these must be copied again for the other.
#pragma once

#include "batch/batch.h"

namespace bunkbed {

// in_other[i]: whether batch.unique()[i] is a row of `other` too. Time and memory are linear in the two batches.
void rows_in_other(const Batch& batch, const Batch& other, bool* in_other);

}  // namespace bunkbed
